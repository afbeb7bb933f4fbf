"""Other threads that complete parameters while one steps: no update is lost, or made twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn
from typing_extensions import override

from lightning_dear.compression import Compressor, Int8, OkTopk
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import SingleFusion
from tests.distributed.harness import distributed
from tests.exchange.sparse_runs import check_all_alike
from tests.training.linear import Run
from tests.training.three_ways import new_pipeline

SECONDS = 20.0
A_WHILE = 0.2


# In ranks of its own: once torch has seen an SGD, each of its steps calls hooks, also from the step
# of this subclass.
class Interrupted(torch.optim.SGD):
    """Calls all of `within` whenever it steps, with whatever parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, lr)
        self.within: list[Callable[[], None]] = []

    @override
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = closure() if closure is not None else None
        for call in self.within:
            call()
        super().step()
        return loss


class Single:
    """One weight that falls by 1 in each step; one rank."""

    def __init__(self, codec: Compressor, gather: str) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        self.optimizer = Interrupted(self.model.parameters(), lr=1.0)
        options = ExchangeOptions(gather, compressor=codec)
        self.pipeline: Pipeline = new_pipeline(
            self.model, self.optimizer, SingleFusion(), options=options
        )

    def step(self) -> None:
        with self.pipeline.forward():
            loss = self.model(torch.ones(1, 1)).sum()
        with self.pipeline.backward():
            loss.backward()
        self.optimizer.step()

    @property
    def weight(self) -> float:
        self.pipeline.complete_parameters()
        return self.model.weight.item()


def after_one_step(codec: Compressor, gather: str = "gradients") -> Single:
    run = Single(codec, gather)
    run.step()
    run.optimizer.zero_grad()
    assert run.weight == -1
    return run


@pytest.mark.parametrize("gather", ["gradients", "parameters"])
@distributed(world_sizes=(1,), keeps_ranks=False)
def test_a_thread_that_completes_in_a_step_waits_for_its_end(gather: str) -> None:
    run = after_one_step(OkTopk() if gather == "gradients" else Int8(), gather)
    seen: list[float] = []
    other = threading.Thread(target=lambda: seen.append(run.weight), daemon=True)

    def begin_to_read() -> None:
        if other.ident is None:
            other.start()
            other.join(A_WHILE)
            assert other.is_alive()

    run.optimizer.within.append(begin_to_read)
    run.step()
    other.join(SECONDS)
    assert seen == [-2]
    assert run.weight == -2


@distributed(world_sizes=(1,), keeps_ranks=False)
def test_zero_grad_waits_for_an_update_that_another_thread_makes() -> None:
    run = after_one_step(OkTopk())
    run.step()
    is_inside, may_go_on = threading.Event(), threading.Event()

    def dwell() -> None:
        is_inside.set()
        may_go_on.wait(A_WHILE)

    run.optimizer.within.append(dwell)
    other = threading.Thread(target=run.pipeline.complete_parameters, daemon=True)
    other.start()
    assert is_inside.wait(SECONDS)
    run.optimizer.zero_grad()
    may_go_on.set()
    other.join(SECONDS)
    assert run.weight == -2


@distributed(world_sizes=(1,), keeps_ranks=False)
def test_a_step_that_breaks_off_keeps_no_thread_waiting() -> None:
    run = after_one_step(OkTopk())

    def break_off() -> None:
        run.optimizer.within.clear()
        raise OSError("broken off")

    run.optimizer.within.append(break_off)
    with pytest.raises(OSError, match="broken off"):
        run.step()
    run.pipeline.abandon()
    other = threading.Thread(target=run.pipeline.complete_parameters, daemon=True)
    other.start()
    other.join(SECONDS)
    assert not other.is_alive()


@distributed(world_sizes=(1,), keeps_ranks=False)
def test_a_thread_that_ends_within_its_step_keeps_no_other_waiting() -> None:
    run = after_one_step(OkTopk())

    def end_the_thread() -> None:
        raise SystemExit  # which ends a thread without a word

    run.optimizer.within.append(end_the_thread)
    stepping = threading.Thread(target=run.step, name="stepping")
    stepping.start()
    stepping.join(SECONDS)
    with pytest.raises(RuntimeError, match=r"Thread stepping ended within optimizer\.step"):
        run.pipeline.complete_parameters()


@distributed(world_sizes=(2,), keeps_ranks=False)
def test_threads_that_complete_all_the_time_change_nothing() -> None:
    run = Run(ExchangeOptions("gradients", compressor=OkTopk(density=0.05, tau_prime=3)))
    is_done = threading.Event()

    def complete() -> None:
        while not is_done.is_set():
            run.pipeline.complete_parameters()

    other = threading.Thread(target=complete, daemon=True)
    run.step()
    other.start()
    for step in range(12):
        run.part.use_compressor(OkTopk(density=0.05 if step % 6 < 3 else 0.1, tau_prime=3))
        run.step()
    is_done.set()
    other.join(SECONDS)
    check_all_alike(run)
    assert run.error() <= 1e-5
