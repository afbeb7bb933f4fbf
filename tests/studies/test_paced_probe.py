"""Alpha from pretended backwards: by hand, and between real ranks."""

from __future__ import annotations

import pytest
import torch

from lightning_dear.collectives.factory import new_collectives
from lightning_dear.planning import LinkCost
from lightning_dear.studies.probes.paced import _end_s, alpha_of, due_of, with_paced_alpha
from lightning_dear.studies.probes.sizes import Spread
from tests.distributed.harness import distributed
from tests.planning.models import chain

CPU = torch.device("cpu")
# 4 small ones and a large one, whose bytes take 1 s: 2 ranks send as many bytes as a buffer has.
DUE = [(0.0, 1), (0.1, 1), (0.2, 1 << 20), (0.3, 1), (0.4, 1)]
COST = LinkCost(0.5, 1 / (4 << 20))


def test_the_alpha_that_a_backward_took_is_found() -> None:
    for alpha_s in (0.15, 0.3, 2.0):
        end_s = _end_s(alpha_s, DUE, COST, 2)
        assert alpha_of(end_s, DUE, COST, 2) == pytest.approx(alpha_s, rel=1e-3)


def test_the_longer_of_alpha_and_bytes_counts() -> None:
    # 0.15 + 0.15 until 0.3, the large one until 1.3, and two more.
    assert _end_s(0.15, DUE, COST, 2) == pytest.approx(1.6)


def test_what_is_hidden_leaves_what_trains_have_told() -> None:
    due = [(0.0, 1), (1.0, 1), (2.0, 1)]
    for trains_s in (0.01, 0.5):
        cost = LinkCost(trains_s, 0.0)
        # Backward takes 2 s, and the last start is within what its repeats differ by.
        told = alpha_of(2.01, due, cost, 2)
        assert told == pytest.approx(min(trains_s, 0.0502), abs=1e-3)


def test_gradients_are_due_in_the_order_of_backward() -> None:
    tensors, times = chain([3, 4], [1.0, 1.0], [2.0, 2.0])
    due = due_of(tensors, times)
    assert [ready_s for ready_s, _ in due] == sorted(times.ready_s.values())
    assert [numel for _, numel in due] == [tensors[1].numel, tensors[0].numel]


@distributed(world_sizes=(2, 3))
def test_all_ranks_find_the_same(world_size: int) -> None:
    collectives = new_collectives(CPU)
    sent_before = collectives.ledger.total_bytes
    trains = Spread(LinkCost(1e-3, 1e-9), LinkCost(2e-3, 2e-9), LinkCost(3e-3, 3e-9))
    found, cpu_s = with_paced_alpha(
        trains, collectives, CPU, [(0.0, 64)] * 20 + [(0.01, 4096)] * 20
    )
    for one, other in zip(
        (found.least, found.middle, found.most),
        (trains.least, trains.middle, trains.most),
        strict=True,
    ):
        assert 0 <= one.alpha_s < 1
        assert one.beta_s == other.beta_s
    assert found.least.alpha_s <= found.middle.alpha_s <= found.most.alpha_s + 1e-9
    assert 0 < cpu_s < 1
    assert collectives.all_gather_object((found, cpu_s)) == [(found, cpu_s)] * world_size
    # Training's bytes stay training's.
    assert collectives.ledger.total_bytes == sent_before
