"""A tree of modules, looked at again and again: what was exchanged in it is found."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from lightning_dear.engine.module_tree import ModuleTree, aliased_names


def _assign(net: Any) -> None:
    net[0].weight = nn.Parameter(torch.zeros(3, 3))


def _tie(net: Any) -> None:
    net[0].weight = net[1][0].weight


def _insert(net: Any) -> None:
    net[1].append(nn.Linear(3, 3))


def _exchange(net: Any) -> None:
    net[1][0] = nn.Linear(3, 3)


def _remove(net: Any) -> None:
    del net[1][1]


def _remove_parameter(net: Any) -> None:
    net[0].bias = None


@pytest.mark.parametrize("change", [_assign, _tie, _insert, _exchange, _remove, _remove_parameter])
def test_a_look_finds_what_was_exchanged(change: Callable[[Any], None]) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    tree = ModuleTree(net)
    before = tree.version
    tree.look()
    assert tree.version == before
    change(net)
    tree.look()
    assert tree.version == before + 1
    tree.look()
    assert tree.version == before + 1


def test_values_that_are_written_are_no_exchange() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    tree = ModuleTree(net)
    before = tree.version
    with torch.no_grad():
        net[0].weight.zero_()
        net[0].weight.data = torch.ones(3, 3)
    tree.look()
    assert tree.version == before


def test_buffers_are_those_that_the_modules_hold_now() -> None:
    net: Any = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(2))
    tree = ModuleTree(net)
    found = tree.buffers()
    assert [one[0].dtype for one in found] == [torch.int64, torch.float32]
    assert tree.buffers() is found
    net[0].running_mean = torch.ones(3)
    net[1].running_var = net[1].running_var.double()
    counts, doubles, floats = tree.buffers()
    assert [len(one) for one in (floats, counts, doubles)] == [3, 2, 1]
    assert any(one is net[0].running_mean for one in floats)


def test_ignored_and_shared_buffers() -> None:
    net: Any = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    net[1].running_mean = net[0].running_mean
    tree = ModuleTree(net)
    assert len(tree.buffers()[1]) == 3
    net._ddp_params_and_buffers_to_ignore = ["0.running_var"]
    (_, floats) = tree.buffers()
    assert len(floats) == 2
    assert not any(one is net[0].running_var for one in floats)


def test_modules_of_torchscript_are_in_it() -> None:
    net: Any = nn.Sequential(torch.jit.script(nn.BatchNorm1d(3)), nn.Linear(3, 3))
    tree = ModuleTree(net)
    assert sum(map(len, tree.buffers())) == 3
    before = tree.version
    net[0].weight = nn.Parameter(torch.zeros(3))
    tree.look()
    assert tree.version == before + 1


def _spectral(net: Any) -> Any:
    nn.utils.spectral_norm(net[0])
    net(torch.ones(2, 3))
    return net


def _flat(net: Any) -> Any:
    vector, start = nn.utils.parameters_to_vector(net.parameters()).detach(), 0
    for parameter in net.parameters():
        parameter.data = vector[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    return vector


def _kept_of(take: Callable[[nn.Parameter], Any]) -> Callable[[Any], Any]:
    return lambda net: [take(parameter) for parameter in net.parameters()]


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "a state_dict": lambda net: net.state_dict(),
    "detached": _kept_of(torch.Tensor.detach),
    "data": _kept_of(lambda one: one.data),
    "NumPy": _kept_of(lambda one: one.detach().numpy()),
    "a flat vector": _flat,
}


@pytest.mark.parametrize("name", sorted(HOLDERS))
def test_tensors_that_hold_a_parameters_memory_are_found(name: str) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    kept = HOLDERS[name](net)
    assert aliased_names(net) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    del kept
    assert not aliased_names(net)


def _loaded(net: Any) -> Any:
    stored = io.BytesIO()
    torch.save(net.state_dict(), stored)
    stored.seek(0)
    kept = torch.load(stored)
    net.load_state_dict(kept)
    return kept


def _pruned(net: Any) -> Any:
    return prune.l1_unstructured(net[0], "weight", 0.5)


def _tied(net: Any) -> Any:
    net[1].weight = net[0].weight


def _orthogonal(net: Any) -> Any:
    return parametrizations.orthogonal(net[0])


def _views_alone(net: Any) -> None:
    _flat(net)


INNOCENT: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda net: None,
    "a list of parameters": lambda net: list(net.parameters()),
    "an optimizer": lambda net: torch.optim.AdamW(net.parameters()),
    "a copy": copy.deepcopy,
    "an average": lambda net: torch.optim.swa_utils.AveragedModel(net),
    "loaded weights": _loaded,
    "assigned weights": lambda net: net.load_state_dict(net.state_dict(), assign=True) and None,
    "a forward behind it": lambda net: net(torch.ones(2, 3)).sum().backward(),
    "spectral_norm": _spectral,
    "weight_norm": lambda net: parametrizations.weight_norm(net[0]),
    "orthogonal": _orthogonal,
    "pruning": _pruned,
    "tied weights": _tied,
    "views of one vector that nobody else holds": _views_alone,
    "compiled": lambda net: torch.compile(net, backend="eager"),
    "shared memory": lambda net: (net.share_memory(), net.state_dict()),
}


@pytest.mark.parametrize("name", sorted(INNOCENT))
def test_what_does_not_hold_a_parameters_memory_gives_no_false_alarm(name: str) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    kept = INNOCENT[name](net)
    assert not aliased_names(net), kept


@pytest.mark.parametrize(
    "layer",
    [nn.GRU(3, 3), nn.LSTM(3, 3, 2), nn.MultiheadAttention(4, 2), nn.BatchNorm1d(3)],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_that_keep_lists_of_their_parameters_give_no_false_alarm(layer: nn.Module) -> None:
    assert not aliased_names(layer)
    assert not aliased_names(nn.Sequential(layer, torch.jit.script(nn.Linear(3, 3))))
