"""Buffers that ranks write between steps are rank 0's in the next forward, and found by name."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions
from tests.distributed.harness import distributed
from tests.training.models import batch, build, loss_of, optimizer_for
from tests.training.three_ways import new_native, new_pipeline


class _Scaled(nn.Module):
    """Scales its inputs by a buffer, and has another one that forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = build("mlp")
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("count", torch.zeros(1))
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.scale.item())
        self.count += 1 + int(os.environ["RANK"])
        return self.net(x * self.scale)


def _replace(model: _Scaled, value: float) -> None:
    model.scale = torch.full((1,), value)


def _load(model: _Scaled, value: float) -> None:
    model.load_state_dict({"scale": torch.full((1,), value)}, strict=False)


WRITES = {
    "in place": lambda model, value: model.scale.fill_(value),
    "replaced": _replace,
    "loaded": _load,
}
OPTIONS = {"elements": ExchangeOptions(), "gradients": ExchangeOptions("gradients")}


def _step(pipeline: Pipeline, model: Any, step: int, **how: Any) -> None:
    optimizer = pipeline.parts[0].optimizer
    with pipeline.forward(**how):
        loss = loss_of(model, *batch("mlp", step, int(os.environ["RANK"])))
    with pipeline.backward(synchronize=how.get("synchronize", True)):
        loss.backward()
    if how.get("synchronize", True):
        optimizer.step()
        optimizer.zero_grad()


def _start(model: nn.Module, what: str = "elements") -> Pipeline:
    return new_pipeline(model, optimizer_for("sgd", model), options=OPTIONS[what])


@pytest.mark.parametrize("what", sorted(OPTIONS))
@pytest.mark.parametrize("how", sorted(WRITES))
@distributed(world_sizes=(1, 2, 3))
def test_a_write_after_the_first_step_is_asked_for(how: str, what: str, world_size: int) -> None:
    model, rank = _Scaled(), int(os.environ["RANK"])
    pipeline = _start(model, what)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            _step(pipeline, model, step)
            WRITES[how](model, step + 10.0 * (rank + 1))
    assert model.seen == [1.0, 10.0, 11.0, 12.0]
    pipeline.detach()


@pytest.mark.parametrize("how", sorted(WRITES))
@distributed(world_sizes=(2,))
def test_a_write_between_backward_and_step_counts(how: str, world_size: int) -> None:
    model, rank = _Scaled(), int(os.environ["RANK"])
    pipeline = _start(model)
    for step in range(3):
        with pipeline.forward():
            loss = loss_of(model, *batch("mlp", step, rank))
        with pipeline.backward():
            loss.backward()
        pipeline.parts[0].mean.reduce()
        WRITES[how](model, step + 10.0 * (rank + 1))
        pipeline.parts[0].optimizer.step()
        pipeline.parts[0].optimizer.zero_grad()
    assert model.seen == [1.0, 10.0, 11.0]
    pipeline.detach()


@pytest.mark.parametrize("writer", [0, 1])
@distributed(world_sizes=(2, 3))
def test_a_later_first_write_warns_by_name_and_is_watched(writer: int, world_size: int) -> None:
    model, rank = _Scaled(), int(os.environ["RANK"])
    pipeline = _start(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(6):
            _step(pipeline, model, step)
            if step > 1 and rank >= writer:
                model.scale.fill_(step + 10.0 * (rank + 1))
    told = [str(one.message) for one in caught if "was written between" in str(one.message)]
    assert len(told) == (rank == writer)
    assert all("'scale' (1 such buffers)" in one for one in told)
    own = 12.0 + 10.0 * rank if rank >= writer else 1.0
    assert model.seen[:4] == [1.0, 1.0, 1.0, own]
    # Rank 0's, from the step of that forward on: it does not follow its own broadcast's values.
    assert model.seen[4:] == ([13.0, 14.0] if writer == 0 else [1.0, 1.0])
    pipeline.detach()


@distributed(world_sizes=(2,))
def test_without_writes_there_is_one_question_and_no_other_message(world_size: int) -> None:
    model, rank = _Scaled(), int(os.environ["RANK"])
    pipeline = _start(model)
    sent: list[str] = []
    for name in ("launch_broadcast", "launch_max"):
        launch = getattr(pipeline.collectives, name)
        setattr(
            pipeline.collectives,
            name,
            lambda *args, _name=name, _launch=launch: [sent.append(_name), _launch(*args)][1],
        )
    of_forwards = []
    for step in range(4):
        with pipeline.forward():
            before = len(sent)
            of_forwards.append(sent[:])
            loss = loss_of(model, *batch("mlp", step, rank))
        assert len(sent) == before
        with pipeline.backward():
            loss.backward()
        pipeline.parts[0].optimizer.step()
        pipeline.parts[0].optimizer.zero_grad()
        sent.clear()
    assert of_forwards == [["launch_broadcast"], ["launch_max"], [], []]
    pipeline.detach()


@distributed(world_sizes=(2,))
def test_writes_before_a_forward_that_only_accumulates_stay_as_under_ddp(world_size: int) -> None:
    model, rank = _Scaled(), int(os.environ["RANK"])
    pipeline = _start(model)
    for step in range(8):
        _step(pipeline, model, step, synchronize=step % 2 == 1)
        model.scale.fill_(step + 10.0 * (rank + 1))
    own = 10.0 * (rank + 1)
    assert model.seen == [1.0, own, 11.0, own + 2, 13.0, own + 4, 15.0, own + 6]
    pipeline.detach()


@distributed(world_sizes=(2,))
def test_ranks_that_keep_their_own_buffers_ask_nothing(world_size: int) -> None:
    model, rank = _Scaled(), int(os.environ["RANK"])
    model._ddp_params_and_buffers_to_ignore = ["scale"]
    pipeline = _start(model)
    for step in range(3):
        _step(pipeline, model, step)
        model.scale.fill_(step + 10.0 * (rank + 1))
    assert model.seen == [1.0, 10.0 * (rank + 1), 10.0 * (rank + 1) + 1]
    pipeline.detach()


@distributed(world_sizes=(2,))
def test_buffers_of_inference_mode_have_no_version_and_are_compared_all_the_same(
    world_size: int,
) -> None:
    model, rank = _Scaled(), int(os.environ["RANK"])
    pipeline = _start(model)
    with torch.inference_mode():
        model.scale = model.scale.clone()
    assert model.scale.is_inference()
    if rank == 0:
        with pipeline.forward():
            pass
    else:
        with torch.inference_mode(), pipeline.forward():
            pass
    pipeline.detach()


@distributed(world_sizes=(2,))
def test_on_nccl_writes_are_told_in_the_next_round(
    monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    monkeypatch.setattr("tests.training.three_ways.new_collectives", new_native)
    model, rank = _Scaled(), int(os.environ["RANK"])
    pipeline = _start(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(8):
            _step(pipeline, model, step)
            if step > 1:
                model.scale.fill_(step + 10.0 * (rank + 1))
    assert model.seen[-2:] == [15.0, 16.0]
    pipeline.detach()
