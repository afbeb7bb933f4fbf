"""DGC's exchange against the formulas of its paper, which are told nothing but what was sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dear.compression import DGC
from lightning_dear.planning import FusionPlanner, NoFusion, SingleFusion
from tests.distributed.harness import distributed, run_ranks
from tests.exchange.test_coded import coded
from tests.training.linear import SHAPES, Run, gradients_of, summed
from tests.training.three_ways import SMALL_BUCKETS
from tests.training.wire import Wire, by_tensor, in_rows

Case = tuple[DGC, FusionPlanner]

CASES: tuple[Case, ...] = (
    (DGC(density=0.05, selector="exact"), SMALL_BUCKETS),
    (DGC(density=0.05, selector="sampled"), SMALL_BUCKETS),
    # Samples every 11th number or fewer: slots stay empty.
    (DGC(density=0.9, selector="sampled"), SingleFusion()),
    (DGC(density=0.05, selector="exact", momentum=0.5), SMALL_BUCKETS),
)


class Law:
    """A run beside this rank's u and v of each tensor, in fp64 (Lin et al. 2018, 3.2 and 3.3).

        u <- m u + g / P,  v <- v + u,  u, v <- 0 where v was sent

    Where v was sent is read off the bytes on their way to the owners.
    """

    def __init__(self, codec: DGC, fusion: FusionPlanner) -> None:
        self.codec = codec
        self.run = Run(coded(codec), fusion)
        self.wire = Wire(self.run)
        self.num_empty = 0
        # "velocity" and "sent" are sums over all steps, of u and of what was sent.
        self.own = {
            name: [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
            for name in ("u", "v", "velocity", "sent")
        }
        self.magnitudes = [0.0] * len(SHAPES)

    def step(self) -> None:
        """One step of the run, and the formulas' own."""
        self._accumulate(gradients_of(self.run.num_steps, dist.get_rank()))
        self.run.step()
        sent = {number: _numbers(wire) for number, wire in self.wire.take_sent().items()}
        plan = self.run.part.plan
        assert plan is not None
        assert sorted(sent) == list(range(len(plan.buckets)))
        waiting = in_rows(self.run.part, list(self.run.model.weights), self.own["v"])
        rows = {}
        for number, (values, places) in sent.items():
            rows[number] = torch.zeros_like(waiting[number]).scatter_add_(1, places, values)
            self._check_choice(waiting[number].abs(), rows[number] != 0, values.shape[1])
        self._clear(by_tensor(self.run.part, list(self.run.model.weights), rows))

    def _accumulate(self, gradients: list[Tensor | None]) -> None:
        for number, one in enumerate(gradients):
            assert one is not None
            u = self.codec.momentum * self.own["u"][number] + one.double() / dist.get_world_size()
            self.own["u"][number] = u
            self.own["v"][number] += u
            self.own["velocity"][number] += u
            self.magnitudes[number] += float(summed(u.clone()).norm())

    def _check_choice(self, waiting: Tensor, is_sent: Tensor, k: int) -> None:
        """At most k of a row travel; with the exact selector those are its k largest."""
        found, wanted = is_sent.sum(1), (waiting > 0).sum(1).clamp(max=k)
        self.num_empty += int((wanted - found).sum())
        if self.codec.selector != "exact":
            assert bool((found <= wanted).all())
            assert torch.equal(found > 0, wanted > 0)
            return
        assert torch.equal(found, wanted)
        smallest = waiting.masked_fill(~is_sent, math.inf).amin(1)
        assert bool((smallest >= waiting.masked_fill(is_sent, 0.0).amax(1) * (1 - 1e-5)).all())

    def _clear(self, sent: list[Tensor]) -> None:
        for number, one in enumerate(sent):
            is_sent = one != 0
            _assert_near(one[is_sent], self.own["v"][number][is_sent])
            self.own["sent"][number] += one
            for name in ("u", "v"):
                self.own[name][number][is_sent] = 0.0

    def check(self) -> None:
        """The run keeps u and v; sent + v = sum of u; and weights have all but what is kept."""
        self.run.pipeline.complete_parameters()
        held = self.run.part.plans.residuals.taken().kept
        for number, weight in enumerate(self.run.model.weights):
            u, v = (held["worker", name][weight].double() for name in ("momentum", "residual"))
            _assert_near(u.view(weight.shape), self.own["u"][number])
            _assert_near(v.view(weight.shape), self.own["v"][number])
            total = summed(self.own["sent"][number] + v.view(weight.shape))
            velocity = summed(self.own["velocity"][number].clone())
            assert float((total - velocity).norm()) <= 1e-5 * self.magnitudes[number]
        self.run.expected = [summed(one.clone()) for one in self.own["velocity"]]
        self.run.magnitudes = self.magnitudes
        assert self.run.error() <= 1e-5, self.codec
        assert max(self.run.errors()) <= 1e-4, self.codec


def _numbers(wire: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, k] values, fp64, and [rows, k] places: k fp32 numbers and then k int32 ones."""
    values, places = (half.contiguous() for half in wire.chunk(2, dim=1))
    return values.view(torch.float32).double(), places.view(torch.int32).long()


def _assert_near(ours: Tensor, theirs: Tensor) -> None:
    """As far as fp32 goes after many steps."""
    if theirs.numel():
        largest = float(theirs.abs().max())
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5 * largest)


def _check_law(num_steps: int) -> None:
    for codec, fusion in CASES:
        law = Law(codec, fusion)
        for _ in range(num_steps):
            law.step()
        law.check()
        assert (law.num_empty > 0) is (codec.density > 0.5), codec


@distributed(world_sizes=(1, 3))
def test_dgc_sends_all_of_its_velocity() -> None:
    _check_law(8)


@pytest.mark.slow
@distributed(world_sizes=(1, 2, 3, 4), timeout_s=240)
def test_dgc_sends_all_of_its_velocity_in_fifty_steps() -> None:
    _check_law(50)


def _check_plans(cases: Sequence[Case], num_steps: int) -> None:
    for codec, fusion in cases:
        law = Law(codec, fusion)
        for other in (NoFusion(), SingleFusion(), None):
            for _ in range(num_steps):
                law.step()
            if other is not None:
                part = law.run.part
                part.replan(other.plan(part.tensors, dist.get_world_size()))
        law.check()


@distributed(world_sizes=(2,))
def test_velocity_moves_to_another_plan() -> None:
    _check_plans(CASES[:1], 4)


@pytest.mark.slow
@distributed(world_sizes=(3, 4), timeout_s=240)
def test_velocity_moves_to_other_plans_of_more_ranks() -> None:
    _check_plans(CASES, 17)


# --- another number of ranks ----------------------------------------------------------------------


def _save(folder: Path, num_steps: int) -> None:
    for number, case in enumerate(CASES):
        law = Law(*case)
        for _ in range(num_steps):
            law.step()
        law.check()
        state = law.run.part.optimizer_state_dict()
        whole = {name: [summed(one.clone()) for one in own] for name, own in law.own.items()}
        if dist.get_rank() == 0:
            saved = state, law.run.model.state_dict(), whole, law.magnitudes
            torch.save(saved, folder / f"{number}.pt")


def _go_on(folder: Path, num_steps: int) -> None:
    """Each rank with an equal share of all u and of all v: the sums are what they were."""
    for number, case in enumerate(CASES):
        state, model, whole, magnitudes = torch.load(folder / f"{number}.pt")
        law = Law(*case)
        law.run.model.load_state_dict(model)
        law.run.optimizer.load_state_dict(state)
        law.run.num_steps, law.magnitudes = num_steps, magnitudes
        shares = dist.get_world_size()
        law.own = {name: [one / shares for one in own] for name, own in whole.items()}
        for _ in range(num_steps):
            law.step()
        law.check()


def _check_move(folder: Path, before: int, after: int, num_steps: int) -> None:
    run_ranks(_save, before, folder, num_steps, timeout_s=120)
    run_ranks(_go_on, after, folder, num_steps, timeout_s=120)


def test_velocity_moves_to_other_ranks(tmp_path: Path) -> None:
    _check_move(tmp_path, 2, 3, 3)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2), (3, 4), (3, 1)])
def test_velocity_moves_to_other_ranks_in_fifty_steps(
    tmp_path: Path, before: int, after: int
) -> None:
    _check_move(tmp_path, before, after, 25)
