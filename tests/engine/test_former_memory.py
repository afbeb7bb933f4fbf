"""The memory that parameters had before training: kept up to date if shared, named if not."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import resolve_fusion
from tests.distributed.harness import distributed
from tests.training.models import batch, build, loss_of, optimizer_for, weights
from tests.training.three_ways import new_pipeline, train_steps

OPTIONS = {"elements": ExchangeOptions(), "gradients": ExchangeOptions("gradients")}


def _share(model: nn.Module, *, is_gapped: bool) -> list[Tensor]:
    if is_gapped:
        for one in model.parameters():
            one.data = torch.stack([one.data, one.data], -1)[..., 0]
    model.share_memory()
    return [one.detach() for one in model.parameters()]


def _assert_equal(left: Any, right: Any) -> None:
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("is_gapped", [False, True])
@pytest.mark.parametrize("what", sorted(OPTIONS))
@distributed(world_sizes=(1, 2, 3))
def test_shared_memory_follows_every_step_and_comes_back(
    what: str, is_gapped: bool, world_size: int
) -> None:
    model = build("mlp")
    kept = _share(model, is_gapped=is_gapped)
    pipeline = new_pipeline(model, optimizer_for("adamw", model), options=OPTIONS[what])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            train_steps(pipeline, model, [step])
            pipeline.complete_parameters()
            _assert_equal(kept, weights(model))
    part = pipeline.parts[0]
    plan = resolve_fusion("single", None).plan(part.tensors, world_size)
    part.replan(plan)
    train_steps(pipeline, model, [3])
    pipeline.detach()
    _assert_equal(kept, weights(model))
    assert all(one.is_shared() for one in model.parameters())
    pointers = [one.data_ptr() for one in kept]
    assert [one.data_ptr() for one in model.parameters()] == pointers
    again = new_pipeline(model, optimizer_for("adamw", model), options=OPTIONS[what])
    train_steps(again, model, [4])
    again.complete_parameters()
    _assert_equal(kept, weights(model))
    again.detach()


@distributed(world_sizes=(1, 2))
def test_other_tensors_in_a_parameters_memory_are_named_once(world_size: int) -> None:
    model = build("mlp")
    kept = next(model.parameters()).detach()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipeline = new_pipeline(model, optimizer_for("sgd", model))
        train_steps(pipeline, model, range(3))
        pipeline.detach()
    told = [str(one.message) for one in caught if "share the memory of" in str(one.message)]
    name = next(name for name, _ in model.named_parameters())
    assert len(told) == (os.environ["RANK"] == "0")
    assert all(f"'{name}' (1 such parameters)" in one for one in told)
    assert not torch.equal(kept, next(model.parameters()))


@pytest.mark.parametrize("model_name", ["mlp", "conv", "gpt"])
@distributed(world_sizes=(1, 2))
def test_a_graph_that_is_kept_over_the_first_step_gives_no_alarm(
    model_name: str, world_size: int
) -> None:
    model, rank = build(model_name), int(os.environ["RANK"])
    pipeline = new_pipeline(model, optimizer_for("sgd", model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pipeline.forward():
            loss = loss_of(model, *batch(model_name, 0, rank))
        with pipeline.backward():
            loss.backward(retain_graph=True)
        pipeline.parts[0].optimizer.step()
    pipeline.detach()


@distributed(world_sizes=(1, 2))
def test_an_alias_that_is_gone_by_the_first_step_gives_no_alarm(world_size: int) -> None:
    """As of torch's older spectral_norm, which replaces it in its first forward."""
    model, rank = build("mlp"), int(os.environ["RANK"])
    kept = [one.detach() for one in model.parameters()]
    pipeline = new_pipeline(model, optimizer_for("sgd", model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pipeline.forward():
            loss = loss_of(model, *batch("mlp", 0, rank))
        kept.clear()
        with pipeline.backward():
            loss.backward()
        pipeline.parts[0].optimizer.step()
    pipeline.detach()


@distributed(world_sizes=(2, 3))
def test_a_parameter_of_several_buckets_is_copied_once_all_have_arrived(world_size: int) -> None:
    model = build("mlp")
    kept = _share(model, is_gapped=False)
    pipeline = new_pipeline(model, optimizer_for("sgd", model))
    train_steps(pipeline, model, [0])
    gatherer = pipeline.parts[0].plans.present.gatherer
    cut = [one for one in gatherer._buffers.placements if len(one.buckets) > 1]
    assert cut
    for one in cut:
        before = one.former.clone()
        gatherer.complete(one.buckets[:-1])
        assert torch.equal(one.former, before)
        gatherer.complete(one.buckets[-1:])
        assert not torch.equal(one.former, before)
    pipeline.complete_parameters()
    _assert_equal(kept, weights(model))
    pipeline.detach()
