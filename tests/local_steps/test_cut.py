"""Which parameters are in which fragment."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_dear.local_steps.schedule import cut, num_modules


def layers(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(1, size, bias=False) for size in sizes))


def names(module: nn.Module, fragments: object) -> list[list[str]]:
    return [[*one] for one in cut(module, module.parameters(), fragments)]  # type: ignore[arg-type]


def test_runs_of_modules_have_about_equal_sizes() -> None:
    module = layers(10, 10, 10, 10, 40)
    assert names(module, 2) == [["0.weight", "1.weight", "2.weight", "3.weight"], ["4.weight"]]
    assert names(module, 5) == [[f"{number}.weight"] for number in range(5)]


def test_a_module_is_never_cut() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    assert names(module, 2) == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
    assert num_modules(module, module.parameters()) == 2


def test_a_tied_weight_belongs_to_its_first_module() -> None:
    module = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    module["head"].weight = module["embed"].weight
    assert names(module, 1) == [["embed.weight"]]
    assert num_modules(module, module.parameters()) == 1


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.data())
def test_every_parameter_is_in_one_fragment_and_none_is_empty(
    sizes: list[int], data: st.DataObject
) -> None:
    module = layers(*sizes)
    fragments = data.draw(st.integers(1, len(sizes)))
    made = names(module, fragments)
    assert len(made) == fragments
    assert all(made)
    assert sum(made, []) == [name for name, _ in module.named_parameters()]


def test_only_the_optimizers_parameters_are_cut() -> None:
    module = layers(1, 2, 3)
    own = [module[0].weight, module[2].weight]
    assert [[*one] for one in cut(module, own, 2)] == [["0.weight"], ["2.weight"]]
    # Names of another optimizer's modules leave an empty fragment.
    assert [[*one] for one in cut(module, own, [["0", "2"], ["1"]])] == [
        ["0.weight", "2.weight"],
        [],
    ]


@pytest.mark.parametrize(
    ("fragments", "said"),
    [
        ([["0"], ["1", "2", "3"]], "names '3', and no parameter is there"),
        ([["0"], ["1"]], "'2.weight' is in no fragments"),
        ([["0", "1"], ["1", "2"]], "'1.weight' is in 2 fragments"),
        ([["0.weight", "1"], ["2.bias"]], "names '2.bias'"),
    ],
)
def test_wrong_names(fragments: list[list[str]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        names(layers(1, 2, 3), fragments)


def test_frozen_parameters_have_a_place() -> None:
    module = layers(1, 2)
    module[0].weight.requires_grad_(False)
    assert names(module, 2) == [["0.weight"], ["1.weight"]]
    assert torch.is_tensor(cut(module, module.parameters(), 1)[0]["0.weight"])
