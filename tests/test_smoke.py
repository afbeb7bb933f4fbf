"""Each way to exchange trains, in one start of two ranks: `make smoke` runs it in seconds."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_dear.compression import Compressor, Int8, OkTopk, PowerSGD, TopkA
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import SingleFusion
from tests.distributed.harness import distributed
from tests.engine.test_parity import assert_equal, assert_equal_on_all_ranks
from tests.training.linear import Run
from tests.training.models import weights
from tests.training.three_ways import SMALL_BUCKETS, train_dear, train_reference

EXACT = (
    ExchangeOptions(),
    ExchangeOptions("gradients"),
    ExchangeOptions("gradients", decouple=False),
)
CODECS: tuple[Compressor, ...] = (
    Int8(block_size=64),
    PowerSGD(rank=2),
    OkTopk(density=0.05, tau_prime=3),
    TopkA(density=0.05, tau_prime=3),
)
NUM_STEPS = 5


@distributed(world_sizes=(2,))
def test_every_exchange_trains() -> None:
    """To a single process's bits, or its sums: what an encoded exchange has not sent, it keeps."""
    theirs = train_reference("mlp", "adamw", NUM_STEPS, dist.get_world_size())
    for options in EXACT:
        ours = train_dear("mlp", "adamw", NUM_STEPS, options=options)
        assert_equal(ours, theirs)
        assert_equal_on_all_ranks(ours)
    for codec in CODECS:
        is_sparse = isinstance(codec, OkTopk | TopkA)
        fusion = SingleFusion() if is_sparse else SMALL_BUCKETS
        run = Run(ExchangeOptions("gradients", compressor=codec), fusion)
        for _ in range(NUM_STEPS):
            run.step()
        assert run.error() <= 1e-5, codec
        ours = weights(run.model)
        assert any(torch.count_nonzero(weight) for weight in ours), codec
        assert_equal_on_all_ranks(([ours], []))
