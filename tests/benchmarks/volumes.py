"""What a rank hands to torch.distributed in each step of a training, counted there, to each rank.

Nothing that the engine says of itself is trusted: its own ledger must say the same in the end.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dear.collectives.factory import new_collectives
from lightning_dear.collectives.work import GRADIENT_TAGS, SELECTION_TAGS
from lightning_dear.compression import Compressor, resolve_compressor
from lightning_dear.compression.codec import FewOfMany
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.exchange.sparse.regions import NUM_BINS
from lightning_dear.planning import SingleFusion
from tests.benchmarks.given_gradients import training_of
from tests.distributed.strict import strict

PAYLOAD, METADATA, OTHER = range(3)
"""Kinds of bytes: gradients, what says which they are, and flags and module buffers."""

FIRST_OTHER = 1 << 29
"""Messages of this tag and above are flags and module buffers."""

LEARNING_RATE = 0.05


class Bucket(NamedTuple):
    """Numbers of a bucket, without and with padding."""

    numel: int
    padded_numel: int


class Sent(NamedTuple):
    """What one rank has sent.

    Attributes:
        to_ranks: [steps, 3, ranks] int64: bytes of each kind to each rank.
        buckets: Of the plan.
        digest: Of all weights in the end.
    """

    to_ranks: Tensor
    buckets: list[Bucket]
    digest: str


class Wire:
    """Counts bytes of messages and all-reduces of this process."""

    def __init__(self) -> None:
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._isend: Any = dist.isend
        self._all_reduce: Any = dist.all_reduce
        self._sent = self._nothing()
        self.total = self._nothing()

    def _nothing(self) -> Tensor:
        return torch.zeros((3, self._num_ranks), dtype=torch.int64)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Whoever sends something in the block is counted."""
        with (
            patch.object(dist, "isend", strict("isend", self._note_message)),
            patch.object(dist, "all_reduce", strict("all_reduce", self._note_all_reduce)),
        ):
            yield

    def _note_message(self, tensor: Tensor, *, group: Any, dst: int, tag: int) -> Any:
        nbytes = tensor.nbytes
        if tag >= FIRST_OTHER:
            self._sent[OTHER, dst] += nbytes
        elif tag >= SELECTION_TAGS:
            self._sent[METADATA, dst] += nbytes
        elif tag >= GRADIENT_TAGS:
            raise AssertionError(f"Not of a training step: {nbytes} bytes with tag {tag}.")
        else:
            # A sparse message begins with how many places and numbers are in it.
            is_sparse = tensor.dtype == torch.int32
            payload = 2 * int(tensor[0]) * tensor.element_size() if is_sparse else nbytes
            most_notes = 3 + -(-NUM_BINS // self._num_ranks)
            assert nbytes - payload <= most_notes * tensor.element_size(), "more than it says"
            self._sent[PAYLOAD, dst] += payload
            self._sent[METADATA, dst] += nbytes - payload
        return self._isend(tensor, group=group, dst=dst, tag=tag)

    def _note_all_reduce(self, tensor: Tensor, *, group: Any, async_op: bool) -> Any:
        """A ring: to the next rank both halves, of everything but this rank's part."""
        kind = PAYLOAD if tensor.is_floating_point() else METADATA
        nbytes = 2 * (tensor.nbytes // self._num_ranks * (self._num_ranks - 1))
        self._sent[kind, (self._rank + 1) % self._num_ranks] += nbytes
        return self._all_reduce(tensor, group=group, async_op=async_op)

    def take(self) -> Tensor:
        """[3, ranks]: bytes since the last call."""
        taken, self._sent = self._sent, self._nothing()
        self.total += taken
        return taken


def codec_of(compressor: str, density: float) -> Compressor | None:
    """What the name means, at that density if it has one."""
    codec = resolve_compressor(compressor)
    return codec.at_density(density) if isinstance(codec, FewOfMany) else codec


def train(compressor: str, gradients: str, density: float, numel: int, num_steps: int) -> Sent:
    """Makes some steps of one bucket with SGD. All ranks call.

    Args:
        compressor: Its name.
        gradients: What is trained: see `training_of`.
        density: Share of the numbers that travels.
        numel: See `training_of`.
        num_steps: How many, the recorded first one among them.
    """
    training = training_of(gradients, numel, density)
    optimizer = torch.optim.SGD(training.model.parameters(), lr=LEARNING_RATE)
    options = ExchangeOptions("gradients", compressor=codec_of(compressor, density))
    collectives, steps = new_collectives(torch.device("cpu")), []
    wire = Wire()
    with wire.counting():
        pipeline = Pipeline(
            training.model, [optimizer], collectives, SingleFusion(), options=options
        )
        wire.take()
        for step in range(num_steps):
            with pipeline.forward():
                loss = training.loss_of(step)
            with pipeline.backward():
                torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            # So that whatever is still to be sent is this step's.
            pipeline.complete_parameters()
            steps.append(wire.take())
        plan = pipeline.parts[0].plan
        assert plan is not None
        pipeline.detach()
    wire.take()
    _check_ledger(collectives.ledger, wire.total)
    weights = torch.cat([one.detach().flatten() for one in training.model.parameters()])
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
    buckets = [
        Bucket(sum(piece.numel for piece in spec.slices), spec.padded_numel)
        for spec in plan.buckets
    ]
    return Sent(torch.stack(steps), buckets, digest)


def _check_ledger(ledger: Counter[str], total: Tensor) -> None:
    counted = total.sum(dim=1).tolist()
    told = [0, ledger["metadata"], ledger["other"]]
    told[PAYLOAD] = ledger.total() - sum(told)
    assert counted == told, f"the wire has {counted}, the ledger {told}"
