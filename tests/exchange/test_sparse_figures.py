"""What sparse all-reduces say of themselves, and the bytes that travel."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_dear.bucket import Bucket, FlatBuffers, Role
from lightning_dear.collectives.factory import new_collectives
from lightning_dear.compression import (
    Fp32,
    OkTopk,
    SparseAllReduce,
    TopkA,
    TopkDSA,
)
from lightning_dear.exchange import Traffic
from lightning_dear.exchange.sparse.exchange import check_buckets
from lightning_dear.planning.plan import BucketSpec, Slice
from tests.distributed.harness import distributed
from tests.exchange.sparse_runs import run_of
from tests.exchange.test_sparse_all_reduces import ALL

# --- figures --------------------------------------------------------------------------------------


@distributed(world_sizes=(3,))
def test_figures_say_what_travelled() -> None:
    for codec in ALL:
        run = run_of(codec)
        run.step()
        ledger = run.pipeline.collectives.ledger
        before = ledger["reduce_scatter"] + ledger["all_gather"]
        run.step()
        run.pipeline.complete_parameters()
        (one,) = run.part.plans.active.exchange.coded
        assert 4 * one.tally.words_sent == (
            ledger["reduce_scatter"] + ledger["all_gather"] - before
        )
        words = torch.tensor([one.tally.words_sent, one.tally.words_received])
        dist.all_reduce(words)
        assert words[0] == words[1], codec
        figures = run.part.encoding_figures()
        run.part.use_compressor(Fp32())
        run.step()
        run.pipeline.complete_parameters()
        assert run.part.encoding_figures() | {"residual_norm": 0} == figures | {
            "residual_norm": 0,
            "compression_ratio": 1.0,
        }
        k = codec.entries(one.numel)
        assert figures["num_wanted"] == k
        assert codec.name == "gaussiank" or 2 / 3 * k <= figures["num_selected"] <= 4 / 3 * k
        # Of equal regions one may get much more than another.
        assert 0 < figures["share_of_bound"] <= (2 if isinstance(codec, TopkDSA) else 1)
        assert 0 <= figures["held_back"] < 1
        if isinstance(codec, OkTopk):
            assert 2 / 3 * k <= figures["num_kept"] <= k
            assert 1 <= figures["imbalance"] <= 1.25 * k / figures["num_kept"]


@distributed(world_sizes=(3,))
def test_never_more_than_k_come_back_whatever_the_density_was() -> None:
    """Owners' shares are of a k: of another one nothing is known until owners have agreed."""
    run = run_of(OkTopk(density=0.2))
    for density in (0.2, 0.05, 0.1, 0.02, 0.2):
        # The last gathers are under way still.
        run.part.use_compressor(OkTopk(density=density))
        for _ in range(2):
            run.step()
            run.pipeline.complete_parameters()
            (one,) = run.part.plans.active.exchange.coded
            # Regions follow, too.
            assert one.selection.k / 2 <= one.tally.num_kept <= one.selection.k, density
        run.step()


@distributed(world_sizes=(2,))
def test_what_compresses_nothing_says_so() -> None:
    for codec in (OkTopk(density=1e-4), OkTopk(density=1e-4, mode="static"), TopkA(density=1e-4)):
        run = run_of(codec)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.step()
        said = [str(one.message) for one in caught if "compresses nothing" in str(one.message)]
        assert len(said) == (dist.get_rank() == 0), codec
        assert all("Raise density or bucket_cap_mb" in one for one in said)


def test_places_have_32_bits() -> None:
    spec = BucketSpec("float32", (Slice(0, 0, 2**31, 0),), 2**31, 4)
    none = torch.empty(0)
    bucket = Bucket(0, spec, Role.SCATTERED, *[none] * 7)
    collectives, flat = new_collectives(torch.device("cpu")), FlatBuffers([bucket], [])
    with pytest.raises(ValueError, match="2,147,483,648.*Fuse less"):
        check_buckets(OkTopk(), Traffic(collectives, 0, flat, is_of_gradients=True))
    check_buckets(OkTopk(), Traffic(collectives, 0, flat, is_of_gradients=True, uncompressed=(0,)))


# --- bytes ----------------------------------------------------------------------------------------


def _words_of_a_step(codec: SparseAllReduce) -> list[tuple[int, Any]]:
    """Payload words that this rank has sent in each of some steps, and the run."""
    run = run_of(codec)
    run.step()
    seen = []
    for _ in range(6):
        ledger = run.pipeline.collectives.ledger
        before = ledger.total() - ledger["metadata"] - ledger["other"]
        run.step()
        run.pipeline.complete_parameters()
        after = ledger.total() - ledger["metadata"] - ledger["other"]
        seen.append(((after - before) // 4, run))
    return seen


@distributed(world_sizes=(3,))
def test_bytes_are_those_of_each_formula() -> None:
    _check_bytes_are_those_of_each_formula()


@pytest.mark.slow
@distributed(world_sizes=(2, 4))
def test_bytes_are_those_of_each_formula_on_other_numbers_of_ranks() -> None:
    _check_bytes_are_those_of_each_formula()


def _check_bytes_are_those_of_each_formula() -> None:
    world_size = dist.get_world_size()
    for codec in ALL:
        for words, run in _words_of_a_step(codec):
            numel = sum(weight.numel() for weight in run.model.weights)
            sent = torch.tensor([words])
            dist.all_reduce(sent, dist.ReduceOp.MAX)
            most = codec.most_words(numel, world_size)
            if not isinstance(codec, TopkDSA):
                assert sent <= most, codec
            if type(codec) is TopkA:
                # Thresholds that are used again find a few less.
                assert words >= most * 0.6
            if codec == TopkDSA(density=0.4, tau_prime=3):
                padded = run.part.plan.buckets[0].padded_numel
                gathered = padded * (world_size - 1) // world_size
                assert words >= gathered, "the sums were not sent as they are"
