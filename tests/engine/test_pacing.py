"""Messages sent in step with other ranks: the same bits, the same errors."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_dear import collectives as making
from lightning_dear.collectives import new_collectives
from lightning_dear.pairwise import PairwiseCollectives
from tests.distributed.harness import distributed
from tests.engine.test_early_steps import EarlyFusion, Run, flat
from tests.engine.training import train_dear


def _pacing(paces: bool) -> None:
    making._FAST_BYTES_PER_S = float("inf") if paces else 1e-9
    collectives = new_collectives(torch.device("cpu"))
    assert isinstance(collectives, PairwiseCollectives)
    assert collectives._paces == (paces and dist.get_world_size() > 2)


@distributed(world_sizes=(2, 3, 4))
def test_pacing_changes_no_bit() -> None:
    traces = []
    for paces in (True, False):
        _pacing(paces)
        traces.append(train_dear("wide_mlp", "adamw", 5))
    for left, right in zip(traces[0][0][-1], traces[1][0][-1], strict=True):
        assert torch.equal(left, right)


@distributed(world_sizes=(3,))
def test_early_gathers_and_others_keep_one_order() -> None:
    weights = []
    for paces in (True, False):
        _pacing(paces)
        run = Run("sgd")
        for step in range(5):
            if dist.get_rank() == 1:
                # One rank finds nothing arrived in backward, and steps all of it afterwards.
                run.part._active and setattr(run.part._active.reducer, "has_arrived", _never)
            run.step(step)
        run.pipeline.detach()
        assert (sum(run.num_early) > 0) == (dist.get_rank() != 1)
        weights.append(flat(run.model))
    assert torch.equal(*weights)
    assert EarlyFusion().plan([], 1).early == ()


def _never(number: int) -> bool:
    return False
