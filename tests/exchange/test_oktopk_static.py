"""Ok-Topk in messages that are always as long. Other tests of Ok-Topk have it as a second mode."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from lightning_dear.collectives.world import World
from lightning_dear.compression import Gaussiank, GTopk, OkTopk, TopkA, TopkDSA
from lightning_dear.exchange.options import ExchangeOptions
from tests.distributed.harness import distributed
from tests.exchange.sparse_runs import STATIC, buckets_of, run_of
from tests.training.linear import Run


@distributed(world_sizes=(3,))
def test_static_messages_are_always_as_long() -> None:
    """Whatever is selected, 0 where nothing is: no count travels in either half."""
    run, ledger = run_of(replace(STATIC, tau=1)), None
    for step in range(6):
        ledger = run.pipeline.collectives.ledger
        before = ledger.copy()
        run.backward(leaves_out=step == 2, scale=0.0 if step == 4 else 1.0)
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.pipeline.complete_parameters()
        (one,) = buckets_of(run)
        room, kept = one.selection.most_sent, one.selection.most_owned
        assert (room, kept) == (int(1.5 * one.selection.k / 3), one.selection.k // 3)
        assert ledger["reduce_scatter"] - before["reduce_scatter"] == 2 * 4 * 2 * room
        assert ledger["all_gather"] - before["all_gather"] == 2 * 4 * 2 * kept
        # Of each a histogram.
        assert ledger["metadata"] - before["metadata"] <= 2 * 4 * 256
        figures = run.part.encoding_figures()
        assert figures["share_of_bound"] == pytest.approx(5 / 6, rel=0.01)
        assert 0 < figures["num_kept"] <= one.selection.k


@distributed(world_sizes=(2,))
def test_where_the_host_does_not_look_steps_with_nan_may_be_left_out() -> None:
    """Also where a hook that clips has spread the nan; otherwise bits are the usual ones."""
    run, other = (run_of(STATIC) for _ in range(2))
    run.pipeline.collectives.wait_blocks_host = False  # as on NCCL
    for step in range(5):
        if step > 1:
            _reduce_nan_that_a_hook_spreads(run)
            # As a loss scale that backs off.
            run.optimizer.zero_grad()
        for one in (run, other):
            one.step()
            one.pipeline.complete_parameters()
        pairs = zip(run.model.weights, other.model.weights, strict=True)
        assert all(torch.equal(own, usual) for own, usual in pairs)
    _reduce_nan_that_a_hook_spreads(run)
    run.optimizer.step()
    run.pipeline.complete_parameters()
    assert all(bool(one.isnan().all()) for one in run.model.weights)


def _reduce_nan_that_a_hook_spreads(run: Run) -> None:
    run.backward(scale=math.nan if dist.get_rank() == 0 else 1.0, step=100)
    run.part.mean.expose()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.part.mean.reduce()
    assert bool(buckets_of(run)[0].bucket.mean.isnan().any())


class NativeLike:
    """As NCCL's, of which the host reads nothing."""

    world, has_variable_lengths = World(0, 2), False


def test_what_looks_up_counts_is_for_cpus_only() -> None:
    for codec in (OkTopk(), TopkA(), GTopk(), TopkDSA(), Gaussiank()):
        options = ExchangeOptions("gradients", compressor=codec)
        with pytest.raises(ValueError, match=r"only on CPUs.*OkTopk\(mode=.static.\)"):
            options.check(NativeLike(), 1)  # type: ignore[arg-type]
    options = ExchangeOptions("gradients", compressor=OkTopk(mode="static"))
    options.check(NativeLike(), 1)  # type: ignore[arg-type]
