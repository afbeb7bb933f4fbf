"""Who sends all numbers trains as who encodes nothing.

To the bit, but for the order of the same sums where a codec keeps momentum, or has no owners.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dear.compression import (
    COMPRESSORS,
    DGC,
    OkTopk,
    TopK,
    resolve_compressor,
)
from lightning_dear.compression.selectors import SELECTORS
from lightning_dear.exchange.options import ExchangeOptions
from tests.distributed.harness import distributed
from tests.training.linear import Run
from tests.training.models import weights

KNOWN = [one for one in map(resolve_compressor, COMPRESSORS) if one is not None]
CASES = (
    *(one.at_density(1.0) for one in KNOWN if one.has_density),
    *(make(selector=one, density=1.0) for make in (TopK, DGC) for one in SELECTORS),
    OkTopk(density=1.0, mode="static"),
    OkTopk(density=1.0, momentum=0.9),
)


def _weights(options: ExchangeOptions, momentum: float, num_steps: int) -> list[Tensor]:
    run = Run(options, momentum=momentum)
    for _ in range(num_steps):
        run.step()
    run.pipeline.complete_parameters()
    return weights(run.model)


@distributed(world_sizes=(1, 2, 3))
def test_a_density_of_one_gives_the_dense_trajectory(world_size: int) -> None:
    dense = _weights(ExchangeOptions("gradients"), 0.9, 5)
    for codec in CASES:
        own = 0.0 if codec.brings_momentum else 0.9
        ours = _weights(ExchangeOptions("gradients", compressor=codec), own, 5)
        # An all-reduce of three ranks adds up in an order of its own.
        if not codec.brings_momentum and not codec.all_reduces:
            assert all(map(torch.equal, ours, dense)), codec
        for one, other in zip(ours, dense, strict=True):
            slack = 1e-6 * float(other.abs().max())
            torch.testing.assert_close(one, other, rtol=1e-5, atol=slack, msg=repr(codec))
