"""What people see of exchanges: figures, statistics of steps, and timelines."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD, AdamW

from lightning_dear.collectives.world import World
from lightning_dear.engine.notes import Sums
from lightning_dear.local_steps import LocalSteps, OuterHalf
from lightning_dear.telemetry.timeline import Span, Timeline
from tests.distributed.harness import distributed
from tests.local_steps.reference import Law, Reference
from tests.local_steps.test_law import FRAGMENTS, NESTEROV, Ours, new_model, step

ALL = {"on_all_ranks": True, "with_drift": False}
SLEPT_S = 0.2


class Measured(Reference):
    """Knows norm and agreement of each exchange, in the order of the sends."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.norms: list[tuple[float, float]] = []

    def send(self, fragment: int) -> None:
        names = self.shadows[fragment]
        thetas = [dict(one.named_parameters()) for one in self.replicas]
        own = [
            torch.cat([(self.anchor[n] - theta[n].detach()).flatten() for n in names])
            for theta in thetas
        ]
        mean = sum(own, torch.zeros(())) / self.world
        cosines = [torch.cosine_similarity(mean, one, dim=0) * one.norm() for one in own]
        weighted = float(sum(cosines, torch.zeros(()))) / sum(float(one.norm()) for one in own)
        self.norms.append((float(mean.norm()), weighted))
        super().send(fragment)


@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (1, 3), (2, 1), (4, 0), (4, 5), (2, 4)])
@distributed(world_sizes=(2, 3))
def test_norm_and_agreement_are_those_of_one_process(fragments: int, delay: int) -> None:
    names, every, new_inner = FRAGMENTS[fragments], 8, partial(AdamW, lr=0.01)
    law = Law(every, names, delay, 0.5, NESTEROV)
    reference = Measured(new_model(), new_inner, dist.get_world_size(), law)
    steps = LocalSteps(every=every, fragments=names, delay=delay, mix=0.5, outer=NESTEROV)
    ours = Ours(steps, new_inner)
    assert ours.outer.figures(**ALL) == {}
    seen: list[dict[str, float]] = []
    for number in range(1, 4 * every + 1):
        ours.run([number])
        reference.run(1, step)
        found = ours.outer.figures(**ALL)
        if found and found.get("exchanges") != len(seen):
            seen.append(found)
    ours.outer.detach()
    # An exchange takes along what the last one merged before its send has measured.
    lag = delay // (every // fragments) + 1
    assert len(seen) > lag
    for number, found in enumerate(seen):
        assert found["exchanges"] == number + 1
        if number < lag:
            assert "agreement" not in found
            continue
        norm, agreement = reference.norms[number - lag]
        assert found["pseudo_gradient_norm"] == pytest.approx(norm, rel=1e-5)
        assert found["agreement"] == pytest.approx(agreement, rel=1e-5)
        assert 0 < agreement < 0.999


@distributed(world_sizes=(2, 3))
def test_replicas_that_move_alike_agree() -> None:
    ours = Ours(LocalSteps(every=2, fragments=1, delay=0), partial(SGD, lr=0.1))
    ours.outer.figures(**ALL)
    rank, dist_rank = dist.get_rank, lambda: 0
    dist.get_rank = dist_rank  # type: ignore[assignment]
    ours.run(range(1, 5))
    dist.get_rank = rank
    assert ours.outer.figures(**ALL)["agreement"] == pytest.approx(1, rel=1e-5)
    ours.outer.detach()


@distributed(world_sizes=(2,))
def test_an_exchange_left_out_has_no_figures() -> None:
    ours = Ours(LocalSteps(every=2, fragments=1, delay=0), partial(SGD, lr=0.1))
    ours.outer.figures(**ALL)
    ours.run(range(1, 5))
    before = ours.outer.figures(**ALL)
    ours.train(5)
    if dist.get_rank() == 1:
        next(ours.model.parameters()).data.fill_(math.nan)
    ours.outer.after_step(ours.optimizer)
    ours.run([6])
    # It has brought the norms of the last merge, and is no exchange.
    assert ours.outer.figures(**ALL)["exchanges"] == before["exchanges"] == 2
    ours.run([7, 8])
    norms = [ours.outer.figures(**ALL)[name] for name in ("pseudo_gradient_norm", "agreement")]
    assert all(map(math.isfinite, norms))
    ours.outer.detach()


@distributed(world_sizes=(2, 3))
def test_drift_is_the_distance_from_the_anchor() -> None:
    ours = Ours(LocalSteps(every=2, fragments=1, delay=0, mix=0), partial(SGD, lr=0.1))

    def drift() -> float:
        return ours.outer.figures(on_all_ranks=False, with_drift=True)["drift"]

    assert drift() == 0
    ours.run([1])
    own = torch.cat([one.detach().flatten() for one in ours.model.parameters()])
    anchor = torch.cat([one.flatten() for one in ours.anchor.values()])
    expected = float((own - anchor).norm() / anchor.norm())
    assert expected > 1e-4
    assert drift() == pytest.approx(expected, rel=1e-5)
    ours.outer.show_anchor()
    assert drift() == pytest.approx(expected, rel=1e-5)
    ours.outer.show_replica()
    ours.run([2])
    assert drift() == 0
    ours.outer.detach()


@distributed(world_sizes=(2, 3))
def test_bytes_are_those_of_the_ledger() -> None:
    every, size = 4, dist.get_world_size()
    ours = Ours(LocalSteps(every=every, fragments=2, delay=1), partial(SGD, lr=0.1))
    collectives = next(iter(ours.outer.fragments))._options.collectives
    instruments = ours.pipeline.training.instruments
    of_steps, of_exchanges, num_merged, before = [], [], 0, collectives.ledger.total()
    for number in range(1, 8 * every + 1):
        ours.run([number])
        assert instruments.statistics is not None
        of_steps.append(instruments.statistics.wire_bytes)
        # In the step in which it is sent: nothing is sent later.
        assert sum(of_steps) == collectives.ledger.total() - before, number
        found = ours.outer.figures(on_all_ranks=False, with_drift=False)
        if found and found["exchanges"] > num_merged:
            num_merged = int(found["exchanges"])
            of_exchanges.append(found["exchange_wire_bytes"])
            assert sum(of_exchanges) == sum(of_steps), number
    ours.outer.detach()
    assert num_merged == 16
    payload = sum(collectives.ledger[kind] for kind in ("reduce_scatter", "all_gather"))
    # Flags: a byte for each of 4 parameters, and notes.
    assert 4 <= (sum(of_steps) - payload) / num_merged / (size - 1) < 64


@distributed(world_sizes=(2, 3))
def test_norms_cost_16_bytes_a_rank_where_all_ask() -> None:
    sent = []
    for asks in (False, True):
        ours = Ours(LocalSteps(every=2, fragments=1, delay=0), partial(SGD, lr=0.1))
        ours.outer.figures(on_all_ranks=asks, with_drift=False)
        ours.run(range(1, 5))
        found = ours.outer.figures(on_all_ranks=asks, with_drift=False)
        assert ("agreement" in found) == asks
        sent.append(found["exchange_wire_bytes"])
        ours.outer.detach()
    size = dist.get_world_size()
    assert sent[1] - sent[0] == 16 * size * (size - 1)


@distributed(world_sizes=(2, 3))
def test_waits_for_a_late_rank_are_exposed_in_the_step_of_the_merge() -> None:
    last = dist.get_world_size() - 1
    ours = Ours(LocalSteps(every=4, fragments=1, delay=0), partial(SGD, lr=0.1))
    waits_s, exposed_s = [], []
    for number in range(1, 13):
        if number > 4 and dist.get_rank() == last:
            time.sleep(SLEPT_S)
        ours.run([number])
        statistics = ours.pipeline.training.instruments.statistics
        assert statistics is not None
        waits_s.append(statistics.exposed_s)
        if number % 4 == 0:
            figures = ours.outer.figures(on_all_ranks=False, with_drift=False)
            exposed_s.append(figures["exchange_exposed_s"])
    ours.outer.detach()
    slept_s = 4 * SLEPT_S
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, waits_s)
    # Not all bounds are in seconds: ranks share cores with other work.
    assert min(everyone[last][7], everyone[last][11]) < everyone[0][11] / 2
    if dist.get_rank() == last:
        return
    for number in (8, 12):
        assert 0.4 * slept_s < waits_s[number - 1]
        assert sorted(waits_s[number - 4 : number - 1])[1] < waits_s[number - 1] / 2
    assert exposed_s[1:] == pytest.approx([waits_s[7], waits_s[11]], abs=0.05)


def _recorded(steps: LocalSteps, num_steps: int) -> list[Span]:
    ours, timeline = Ours(steps, partial(SGD, lr=0.1)), Timeline()
    ours.run(range(1, 2 * steps.every + 1))
    ours.pipeline.training.instruments.record_in(timeline)
    ours.run(range(2 * steps.every + 1, 2 * steps.every + num_steps + 1))
    ours.outer.finish()
    timeline.clock.finish()
    ours.outer.detach()
    return timeline.spans


@distributed(world_sizes=(2, 3))
def test_an_exchange_is_a_lane_from_its_send_to_its_merge() -> None:
    spans = _recorded(LocalSteps(every=4, fragments=2, delay=1, mix=0), 9)
    exchanges = [one for one in spans if one.lane == "exchange"]
    # Sent after steps 1, 3, 5, 7, 9 of the recording, and both at the end.
    names = [f"fragment {number}" for number in (0, 1, 0, 1, 0, 0, 1)]
    assert [one.name for one in exchanges] == names
    forwards = [one for one in spans if one.lane == "forward"]
    for one in exchanges[:4]:
        inside = [f for f in forwards if one.start_s < f.start_s and f.end_s < one.end_s]
        assert len(inside) == 1
    waits = [one for one in spans if one.lane == "wait" and one.name == "anchor"]
    assert len(waits) == 7
    for one, wait in zip(exchanges, waits, strict=True):
        assert one.start_s < wait.start_s < wait.end_s < one.end_s
    lanes = {one.lane for one in spans}
    assert {"reduce_scatter", "all_gather", "other"} <= lanes


def test_sums_are_of_all_ranks() -> None:
    notes = [Sums(World(rank, 3)) for rank in range(3)]
    for rank, note in enumerate(notes):
        note.own = (0.1 * rank, math.inf if rank == 2 else -1.5)
    said = [note.say() for note in notes]
    assert {len(one) for one in said} == {notes[0].num_bytes} == {48}
    maxima = [max(column) for column in zip(*said, strict=True)]
    for note in notes:
        note.hear(maxima)
        assert note.heard == [0.1 + 0.2, math.inf]
        note.own = ()
        assert (note.num_bytes, note.say()) == (0, b"")
        note.hear([])
        assert note.heard == []


def test_without_local_steps_there_are_no_figures() -> None:
    assert OuterHalf().figures(on_all_ranks=True, with_drift=True) == {}
