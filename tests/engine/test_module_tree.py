"""A tree of modules, looked at again and again: what was exchanged in it is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_dear.engine.module_tree import ModuleTree


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
    assert [one[0].dtype for one in found] == [torch.float32, torch.int64]
    assert tree.buffers() is found
    net[0].running_mean = torch.ones(3)
    net[1].running_var = net[1].running_var.double()
    floats, counts, doubles = tree.buffers()
    assert [len(one) for one in (floats, counts, doubles)] == [3, 2, 1]
    assert any(one is net[0].running_mean for one in floats)


def test_ignored_and_shared_buffers() -> None:
    net: Any = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    net[1].running_mean = net[0].running_mean
    tree = ModuleTree(net)
    assert len(tree.buffers()[0]) == 3
    net._ddp_params_and_buffers_to_ignore = ["0.running_var"]
    (floats, _) = tree.buffers()
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
