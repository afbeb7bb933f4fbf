"""Backward may have collectives of its own: a rank that is in one must not be waited for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_dear.compression import Int8, OkTopk, PowerSGD
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import NoFusion
from tests.distributed.harness import distributed
from tests.engine.test_all_reduced import assert_same_on_all_ranks
from tests.training.models import weights
from tests.training.three_ways import new_pipeline

WIDTH = 33
USUAL = 2
USES_ON_RANK_1 = (USUAL, USUAL, 0, 1, USUAL)
"""How often rank 1 goes through the last layer, step by step; rank 0 always does so twice."""

OPTIONS = {
    "dense": ExchangeOptions(),
    "int8": ExchangeOptions(compressor=Int8(block_size=64)),
    "powersgd": ExchangeOptions("gradients", compressor=PowerSGD(rank=2, min_saving=1.0)),
    "oktopk": ExchangeOptions("gradients", compressor=OkTopk(density=0.1)),
    "all_reduce": ExchangeOptions("gradients", decouple=False),
}


class _Together(torch.autograd.Function):
    """Waits for all ranks in backward, as SyncBatchNorm does, which torch has for CUDA alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Net(nn.Module):
    """Ranks meet in front of two layers, of which the last has a gradient for each of its uses."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.group = group

    def forward(self, x: Tensor, num_uses: int) -> Tensor:
        x = self.second(_Together.apply(torch.tanh(self.first(x)), self.group))
        for _ in range(num_uses):
            x = checkpoint(self.last, x, use_reentrant=True)
        return x.square().mean()


def _train(options: ExchangeOptions, group: Any, *, sends_in_backward: bool) -> list[Tensor]:
    torch.manual_seed(0)
    net, rank = _Net(group), dist.get_rank()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    pipeline = new_pipeline(net, optimizer, NoFusion(), options=options)
    if not sends_in_backward:
        pipeline.parts[0].is_held_back = True
    for step, num_uses in enumerate(USES_ON_RANK_1):
        generator = torch.Generator().manual_seed(10 * step + rank)
        with pipeline.forward():
            loss = net(torch.randn(4, WIDTH, generator=generator), num_uses if rank else USUAL)
        with pipeline.backward():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    pipeline.detach()
    return weights(net)


@pytest.mark.parametrize("kind", OPTIONS)
@distributed(world_sizes=(2,), timeout_s=20)
def test_one_rank_uses_a_layer_less_often_in_front_of_a_collective(kind: str) -> None:
    group = dist.new_group()
    ours = _train(OPTIONS[kind], group, sends_in_backward=True)
    assert_same_on_all_ranks(ours)
    for one, other in zip(ours, _train(OPTIONS[kind], group, sends_in_backward=False), strict=True):
        assert torch.equal(one, other)
