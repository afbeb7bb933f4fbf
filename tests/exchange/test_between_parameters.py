"""What lies between parameters in a bucket has no lag, whatever a codec decodes zeros to."""

from __future__ import annotations

import torch

from lightning_dear.exchange.options import ExchangeOptions
from tests.distributed.harness import distributed
from tests.training.lagging import LaggingEFSignSGD, LaggingOneBit
from tests.training.linear import Run

NUM_STEPS = 30


@distributed(world_sizes=(2,))
def test_the_lag_that_is_told_is_that_of_the_parameters() -> None:
    for codec in (LaggingEFSignSGD(), LaggingOneBit()):
        run = Run(ExchangeOptions(compressor=codec))
        for _ in range(NUM_STEPS):
            run.step()
        run.pipeline.complete_parameters()
        assert run.part.plans.active is not None
        behind, whole, num_between = [], [], 0
        for bucket in run.part.plans.active.flat.buckets:
            is_between = torch.ones_like(bucket.shard, dtype=torch.bool)
            for piece in run.part.stepper.shards.in_bucket[bucket.number]:
                begin = piece.offset - bucket.own.start
                is_between[begin : begin + piece.numel] = False
            num_between += int(is_between.sum())
            for part in (bucket.shard, bucket.replica):
                assert not part[is_between].any()
            behind.append((bucket.shard - bucket.replica)[~is_between])
            whole.append(bucket.shard[~is_between])
        assert num_between
        expected = torch.cat(behind).norm() / torch.cat(whole).norm()
        torch.testing.assert_close(run.part.encoding_figures()["lag"], expected)
        assert expected > 0
        run.pipeline.detach()
