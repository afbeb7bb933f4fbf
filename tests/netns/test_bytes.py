"""Bytes on the wire, counted by the operating system: 2(P-1)/P of the model, and no more."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch.distributed as dist

from lightning_dear.emulation import EmulatedCluster, EmulatedHost
from lightning_dear.engine.notes import Digest
from tests.distributed.harness import run_ranks
from tests.netns.work import Probe, Stack, train

NUM_LAYERS = 9
NUM_STEPS = 6


def _count(hosts: Sequence[EmulatedHost]) -> tuple[int, int, int]:
    probe = Probe(host=hosts[dist.get_rank()])
    strategy = train(NUM_LAYERS, 4, NUM_STEPS, probe)
    assert strategy.plan is not None
    # From the end of step 2 to the end of the last: whole steps, the recorded one left out.
    whole_steps = NUM_STEPS - 2
    sent = (probe.wire[-1][0] - probe.wire[1][0]) // whole_steps
    received = (probe.wire[-1][1] - probe.wire[1][1]) // whole_steps
    assert len(set(probe.ledger[2:])) == 1
    return sent, received, probe.ledger[-1]


@pytest.mark.alone
@pytest.mark.netns
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_step_moves_what_the_formula_and_the_ledger_say(world_size: int) -> None:
    with EmulatedCluster(num_hosts=world_size, rate_mbit=None, mtu=9000) as cluster:
        counted = run_ranks(_count, world_size, cluster.hosts, hosts=cluster.hosts, timeout_s=120)
    model_bytes = Stack(NUM_LAYERS).num_bytes
    assert model_bytes >= 32 << 20
    expected = 2 * (world_size - 1) / world_size * model_bytes
    # One for each layer's use; digests of options and launches; one each for inf and four signals.
    used_flags = (world_size - 1) * (NUM_LAYERS + 2 * Digest.NUM_BYTES + 5)
    for rank, (sent, received, ledger) in enumerate(counted):
        print(
            f"P={world_size} rank {rank}: sent {sent / expected:.4f}, received"
            f" {received / expected:.4f}, ledger {ledger / expected:.6f} of 2(P-1)/P x model"
        )
        assert sent == pytest.approx(expected, rel=0.03)
        assert received == pytest.approx(expected, rel=0.03)
        # The layers are multiples of the alignment: no padding, so the payload is exact.
        assert ledger == expected + used_flags
        assert sent == pytest.approx(ledger, rel=0.03)
