"""PowerSGD of one matrix on one rank, without an engine, and what its formula says."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from lightning_dear.bucket import allocate
from lightning_dear.collectives.world import World
from lightning_dear.compression import PowerSGD
from lightning_dear.exchange import Traffic
from lightning_dear.exchange.low_rank import LowRankBucket
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning.plan import BucketPlan, BucketSpec, Slice, aligned
from tests.compression.inputs import KINDS, LARGEST

SHAPES = ((12, 40), (40, 12), (64, 64), (7, 131), (150, 9))
"""Of which a rank of 4 saves something."""

ROUNDING = 5e-5
"""Of a norm: what fp32 rounds off, most of it where the first factor is nearly singular."""


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """[n, m] fp32 of one kind, whose norm is at most a quarter of the largest float."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    kind = KINDS[draw(st.sampled_from(tuple(KINDS)))]
    matrix = kind(generator, *draw(st.sampled_from(SHAPES)))
    norm = float(matrix.double().norm())
    return matrix * min(1.0, LARGEST / 4 / norm) if norm else matrix


class Channel:
    """Sends one matrix after another, each with what was lost before unless that is forgotten.

    Args:
        codec: That factors matrices of this shape.
        shape: [n, m].
        device: Where.
    """

    def __init__(
        self, codec: PowerSGD, shape: torch.Size, device: torch.device | str = "cpu"
    ) -> None:
        self._shape, numel = shape, shape.numel()
        spec = BucketSpec("one", (Slice(0, 0, numel, 0),), aligned(numel), 4)
        weight = Parameter(torch.zeros(shape, device=device))
        plan = BucketPlan("one", 1, (spec,), (0,))
        role_of = partial(ExchangeOptions("gradients", compressor=codec).role_of, plan)
        flat = allocate(plan, [weight], role_of, 0, lambda _: 0, keeps_gradients=True)
        alone: Any = SimpleNamespace(world=World())
        traffic = Traffic(alone, 0, flat, is_of_gradients=True)
        self.bucket = LowRankBucket(flat.buckets[0], codec, traffic)

    def send(self, matrix: Tensor) -> Tensor:
        """C(M): what arrives of [n, m] and of what is kept."""
        mean = self.bucket.bucket.mean[: matrix.numel()].view(self._shape)
        mean.copy_(matrix)
        self.bucket.compensated(None)
        messages = self.bucket.encode_first()
        self.bucket.encode_second(messages, None)
        self.bucket.decode(messages)
        self.bucket.commit()
        return mean.clone()

    def forget(self) -> None:
        """Drops what was lost; the factor stays."""
        worker = self.bucket.worker
        worker.kept["residual"].zero_()


def is_a_projection(codec: PowerSGD, matrix: Tensor) -> None:
    """Never further off than 0 is; exact, from the second step on, where the rank suffices."""
    channel, exact = Channel(codec, matrix.shape), matrix.double()
    assert len(channel.bucket.factors) == 1, "the matrix travels as it is"
    came_back = channel.send(matrix)
    assert torch.isfinite(came_back).all()
    assert (came_back.double() - exact).norm() <= (1 + ROUNDING) * exact.norm()
    assert matrix.any() or not came_back.any(), "zeros became something"
    # The first step brings no more than r dimensions: a matrix that has no more comes back whole.
    other = Channel(codec, matrix.shape)
    other.send(came_back)
    other.forget()
    lost = other.send(came_back).double() - came_back.double()
    assert lost.norm() <= ROUNDING * came_back.double().norm()
