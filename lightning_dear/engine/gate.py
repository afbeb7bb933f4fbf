"""Waits where parameters are read: a gate in place of `module._parameters`.

While a parameter of a module is still being gathered, a dict subclass stands in for the module's
`_parameters`; any read or write through it (`self.weight`, `parameters()`, `state_dict()`, `to()`)
first completes the module's parameters. Once they are complete the module's own dict is back, so
that a module that waits for nothing pays nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.nn import Module, Parameter

_READ_OR_WRITE = """
__getitem__ __setitem__ __delitem__ __eq__ __or__ __ior__
get items values copy pop popitem setdefault update clear
"""


def _opening(name: str) -> Any:
    """The dict's method of this name, called on the plain dict once the gate is open."""

    def call(self: ParameterGate, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._opened(), name)(*args, **kwargs)

    return call


class ParameterGate(dict[str, Any]):
    """Stands in for `module._parameters` until `remove_gate` has put `plain` back.

    Holds the same items, so that C-level reads find the right tensors (though without a wait).

    Args:
        plain: The module's own dict; all writes go to it.

    Attributes:
        openers: By whoever closed the gate: what completes its share of the parameters. Several
            when several optimizers train parameters of one module. May block.
    """

    def __init__(self, plain: dict[str, Any]) -> None:
        super().__init__(plain)
        self.plain = plain
        self.openers: dict[int, Callable[[], None]] = {}

    def _opened(self) -> dict[str, Any]:
        for open_gate in tuple(self.openers.values()):
            open_gate()
        return self.plain

    def __iter__(self) -> Iterator[str]:
        # Overridden so that dict(gate) and {**gate} come through __getitem__.
        return iter(self.plain)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Copies and pickles are of a module whose parameters are complete: an ordinary dict.
        return dict, (dict(self._opened()),)


for _name in _READ_OR_WRITE.split():
    setattr(ParameterGate, _name, _opening(_name))


def plain_parameters(module: Module) -> dict[str, Any]:
    """The module's own dict of parameters, without waiting for any; of TorchScript a copy."""
    parameters: dict[str, Any] = module._parameters
    if isinstance(parameters, ParameterGate):
        return parameters.plain
    return parameters if isinstance(parameters, dict) else dict(parameters.items())


def owners(module: Module, parameters: Sequence[Parameter]) -> dict[Module, dict[str, int]]:
    """Modules that hold any of `parameters` -> their names there -> their numbers."""
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    found = {
        part: {
            name: numbers[id(one)]
            for name, one in plain_parameters(part).items()
            if id(one) in numbers
        }
        for part in module.modules()
    }
    return {part: own for part, own in found.items() if own}


def has_gate(module: Module) -> bool:
    """Whether reads of the module's parameters can be made to wait; not those in TorchScript."""
    return isinstance(module._parameters, dict)


def close_gate(module: Module, owner: object, open_gate: Callable[[], None]) -> None:
    """Lets reads of the module's parameters call `open_gate`, until `owner` removes its gate.

    The module must have a gate; see `has_gate`.
    """
    gate = module.__dict__["_parameters"]
    if not isinstance(gate, ParameterGate):
        gate = module.__dict__["_parameters"] = ParameterGate(gate)
    gate.openers[id(owner)] = open_gate


def remove_gate(module: Module, owner: object) -> None:
    """Takes `owner`'s gate away; after the last one the module has its own dict back."""
    gate = module.__dict__.get("_parameters")
    if isinstance(gate, ParameterGate):
        gate.openers.pop(id(owner), None)
        if not gate.openers:
            module.__dict__["_parameters"] = gate.plain
