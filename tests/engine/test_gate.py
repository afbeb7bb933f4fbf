"""The gate opens on every way to read or write a module's parameters, once."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_dear.engine.gate import ModuleGate, ParameterGate, plain_parameters


def _merge_more(module: nn.Linear) -> None:
    module._parameters |= {"more": nn.Parameter(torch.zeros(1))}


TOUCHES: dict[str, Callable[[nn.Linear], object]] = {
    "attribute": lambda module: module.weight,
    "forward": lambda module: module(torch.zeros(1, 3)),
    "parameters": lambda module: list(module.parameters()),
    "state_dict": lambda module: module.state_dict(),
    "load_state_dict": lambda module: module.load_state_dict(nn.Linear(3, 2).state_dict()),
    "assign": lambda module: module.load_state_dict(nn.Linear(3, 2).state_dict(), assign=True),
    "to": lambda module: module.to(torch.float64),
    "set": lambda module: setattr(module, "weight", nn.Parameter(torch.zeros(2, 3))),
    "delete": lambda module: delattr(module, "weight"),
    "register": lambda module: module.register_parameter("extra", nn.Parameter(torch.zeros(1))),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "get": lambda module: module._parameters.get("weight"),
    "values": lambda module: list(module._parameters.values()),
    "pop": lambda module: module._parameters.pop("weight"),
    "dict copy": lambda module: module._parameters.copy(),
    "update": lambda module: module._parameters.update({}),
    "setdefault": lambda module: module._parameters.setdefault("weight"),
    "popitem": lambda module: module._parameters.popitem(),
    "clear": lambda module: module._parameters.clear(),
    "equal": lambda module: module._parameters == {},
    "or": lambda module: module._parameters | {},
    "or in place": _merge_more,
}


@pytest.mark.parametrize("touch", sorted(set(TOUCHES) - {"copy"}))
def test_a_touch_opens_the_gate_and_acts_on_the_real_dict(touch: str) -> None:
    module, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    own = module._parameters
    opened = []

    def open_gate() -> None:
        opened.append(True)
        gate.open()

    gate = ModuleGate(module)
    gate.close(open_gate)
    TOUCHES[touch](module)
    TOUCHES[touch](plain)
    assert opened == [True]
    assert module._parameters is own
    assert list(own) == list(plain._parameters)


@pytest.mark.parametrize(
    "look", [lambda module: "weight" in module._parameters, lambda module: len(module._parameters)]
)
def test_a_look_that_reads_no_value_does_not_wait(look: Callable[[nn.Module], object]) -> None:
    module = nn.Linear(3, 2)
    ModuleGate(module).close(lambda: pytest.fail("waited"))
    look(module)


def test_closing_twice_keeps_the_modules_own_dict() -> None:
    module = nn.Linear(3, 2)
    own, gate = module._parameters, ModuleGate(module)
    gate.close(int)
    gate.close(int)
    assert isinstance(module._parameters, ParameterGate)
    assert plain_parameters(module) is own
    gate.open()
    gate.open()
    assert module._parameters is own


def test_what_is_put_there_again_holds_what_the_modules_own_dict_holds() -> None:
    module = nn.Linear(3, 2)
    gate = ModuleGate(module)
    gate.close(int)
    first = module._parameters
    gate.open()
    module.extra = nn.Parameter(torch.zeros(1))
    gate.close(int)
    assert module._parameters is first
    # As C code reads it, which does not wait.
    assert [*dict.keys(first)] == ["weight", "bias", "extra"]
    gate.open()
    module._parameters = dict(module._parameters)
    gate.close(int)
    assert module._parameters is not first


def test_two_gates_of_a_module_open_one_after_the_other() -> None:
    module = nn.Linear(3, 2)
    own, opened = module._parameters, []
    first, second = ModuleGate(module), ModuleGate(module)
    first.close(lambda: opened.append("first"))
    second.close(lambda: opened.append("second"))
    assert module.weight.shape == (2, 3)
    assert opened == ["first", "second"]
    first.open()
    assert isinstance(module._parameters, ParameterGate)
    second.open()
    assert module._parameters is own
