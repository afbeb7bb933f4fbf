"""What stands between training and the machine is handed in: the calls that send, and the clock."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_dear.collectives.factory import new_collectives
from lightning_dear.collectives.gloo import PairwiseCollectives
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.engine.step_timer import StepTimer
from lightning_dear.planning import NoFusion
from lightning_dear.telemetry.clock import HostClock
from tests.distributed.harness import distributed
from tests.distributed.strict import Strict


class _Noting:
    """torch.distributed, which counts what is called."""

    def __init__(self) -> None:
        self.called: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.called[name] += 1
        return getattr(dist, name)


class _Steady(HostClock):
    """A second passes with every look at it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.mark = self._look  # type: ignore[method-assign, assignment]

    def _look(self) -> float:
        self.now_s += 1.0
        return self.now_s


def _train(pipeline: Pipeline, model: nn.Module, num_steps: int) -> None:
    for _ in range(num_steps):
        with pipeline.forward():
            loss = model(torch.ones(2, 3)).square().sum()
        with pipeline.backward():
            loss.backward()
        pipeline.parts[0].optimizer.step()
        pipeline.parts[0].optimizer.zero_grad()


@distributed(world_sizes=(2,))
def test_all_that_is_sent_goes_through_the_calls_that_are_handed_in() -> None:
    plain = new_collectives(torch.device("cpu"))
    assert isinstance(plain, PairwiseCollectives)
    calls = _Noting()
    groups = plain.reduce_group, plain.gather_group, plain.object_group
    collectives = PairwiseCollectives(*groups, plain.world, Strict(calls))
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline = Pipeline(model, [optimizer], collectives, NoFusion())
    _train(pipeline, model, 1)
    before = Counter(calls.called)
    _train(pipeline, model, 1)
    pipeline.complete_parameters()
    # Two buckets reduced and gathered, and the flags: one message each to the other rank.
    assert calls.called - before == Counter(isend=5, irecv=5)
    assert before["all_gather_object"] > 0
    pipeline.detach()


def test_times_are_those_of_the_clock_that_is_handed_in() -> None:
    model, clock = nn.Linear(3, 2), _Steady()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = PairwiseCollectives(None, None, None)
    pipeline = Pipeline(model, [optimizer], alone, NoFusion(), clock=clock)
    _train(pipeline, model, 1)
    pipeline.measure_next_step()
    _train(pipeline, model, 1)
    times = pipeline.parts[0].timer.times
    assert times is not None
    assert times.forward_s == int(times.forward_s) > 0
    assert times.backward_s == int(times.backward_s) > 0
    pipeline.detach()


def test_a_span_within_another_one_is_left_out_once() -> None:
    clock = _Steady()
    timer = StepTimer(nn.Linear(3, 2), clock)
    timer.is_on = True
    with timer.leaving_out(), timer.leaving_out():
        pass
    after = clock.mark()
    # Four marks, the outer ones three ticks apart.
    assert timer._standing_clock()(after) == clock.seconds(after) - 3
