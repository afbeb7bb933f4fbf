"""What a test of an optimizer on small tensors sees: what it looks at, whatever that is."""

from __future__ import annotations

import re
import time
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.optimizers.tensorwise import (
    choose_options,
    why_not_elementwise,
    why_not_steppable,
)
from tests.optimizers import strangers
from tests.optimizers.strangers import NEITHER, NOT_ELEMENTWISE, Lookahead, OnSphere, Plain

PARTS, WHOLE = ExchangeOptions(), ExchangeOptions("gradients")


def _model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(70, 90), nn.LayerNorm(90))


def _new(kind: Any, **options: Any) -> Any:
    return kind(_model().parameters(), lr=0.1, momentum=0.9, **options)


def _name(kind: Any) -> str:
    return str(kind.__name__)


@pytest.mark.parametrize("kind", NOT_ELEMENTWISE, ids=_name)
def test_what_looks_at_whole_tensors_is_stepped_on_whole_tensors(kind: Any) -> None:
    optimizer = _new(kind)
    assert re.search(
        f"cannot shard {kind.__name__}: .*Use gather='gradients'",
        str(why_not_steppable(optimizer, PARTS)),
    )
    options, problem, remark = choose_options([optimizer], PARTS, WHOLE)
    assert (options, problem) == (WHOLE, None)
    assert remark is not None
    assert f"cannot shard {kind.__name__}" in remark
    assert "every rank gets whole gradients" in remark


def test_what_depends_on_a_place_in_the_group_is_refused() -> None:
    assert re.search(
        "cannot shard ByPlace.*gather='gradients' is no way out",
        str(why_not_steppable(_new(strangers.ByPlace), PARTS)),
    )


@pytest.mark.parametrize("kind", NEITHER, ids=_name)
def test_what_can_be_stepped_in_neither_way_is_refused(kind: Any) -> None:
    optimizer = _new(kind)
    before = torch.get_rng_state()
    options, problem, _ = choose_options([optimizer], PARTS, WHOLE)
    assert options is PARTS
    assert problem is not None
    assert f"cannot shard {kind.__name__}" in problem
    assert "And gather='gradients' is no way out" in problem
    assert torch.equal(before, torch.get_rng_state())


def test_parameters_of_a_class_of_their_own_are_stepped_whole() -> None:
    on_sphere = OnSphere.of(torch.randn(9, 30))
    for kind in (Plain, torch.optim.SGD):
        optimizer = kind([*_model().parameters(), on_sphere], lr=0.1)
        assert re.search(
            f"cannot shard {kind.__name__}: it holds parameters of class OnSphere",
            str(why_not_elementwise(optimizer)),
        )
        assert choose_options([optimizer], PARTS, WHOLE)[0] is WHOLE


def test_who_passes_is_named() -> None:
    options, problem, remark = choose_options([_new(Plain)], PARTS, WHOLE)
    assert (options, problem) == (PARTS, None)
    assert remark is not None
    assert "steps Plain on parts of tensors" in remark
    assert "use gather='gradients'" in remark
    assert choose_options([_new(torch.optim.SGD)], PARTS, WHOLE) == (PARTS, None, None)
    assert choose_options([_new(Plain)], WHOLE, None) == (WHOLE, None, None)


def test_layers_without_a_shape_yet_are_left_to_who_names_them() -> None:
    lazy = torch.optim.SGD(nn.LazyLinear(3).parameters(), lr=0.1)
    assert choose_options([lazy], PARTS, WHOLE) == (PARTS, None, mock.ANY)


def test_whoever_said_how_to_gather_is_not_overruled() -> None:
    options, problem, remark = choose_options([_new(strangers.ClipsNorm)], PARTS, None)
    assert (options, remark) == (PARTS, None)
    assert problem is not None
    assert "Use gather='gradients', which steps whole tensors on every rank" in problem


def test_a_wrapped_optimizer_is_refused_in_any_way() -> None:
    for options in (PARTS, WHOLE):
        assert re.search(
            "does not support Lookahead, which wraps another",
            str(why_not_steppable(Lookahead(_new(torch.optim.SGD)), options)),
        )


def test_steps_that_are_to_be_differentiated_are_refused() -> None:
    for options in (PARTS, WHOLE):
        assert re.search(
            r"SGD\(differentiable=True\)",
            str(why_not_steppable(_new(torch.optim.SGD, differentiable=True), options)),
        )


def test_16_bits_are_stepped_as_masters_and_cannot_be_whole() -> None:
    model = _model().bfloat16()
    assert why_not_steppable(Plain(model.parameters(), lr=0.1), PARTS) is None
    problem = choose_options([strangers.ClipsNorm(model.parameters(), lr=0.1)], PARTS, WHOLE)[1]
    assert problem is not None
    assert "is no way out: gather='gradients' steps torch.bfloat16 parameters without" in problem
    assert "Use a mixed precision" in problem


def test_a_large_model_is_tried_within_a_second() -> None:
    """Of this process, on one core; a start of anything costs more."""
    parameters = [nn.Parameter(torch.randn(8 + n // 4, 3 + n // 7)) for n in range(400)]
    groups = [{"params": [one], "lr": 0.1 / (1 + n)} for n, one in enumerate(parameters)]
    optimizer = strangers.ClipsNorm(groups)
    choose_options([optimizer], PARTS, WHOLE)
    start = time.process_time()
    assert choose_options([optimizer], PARTS, WHOLE)[0] is WHOLE
    assert time.process_time() - start < 2.0
