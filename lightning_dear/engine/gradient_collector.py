"""Autograd's gradients on their way into buckets."""

from __future__ import annotations

from collections.abc import Sequence
from sys import getrefcount

import torch
from torch import Tensor

from lightning_dear.bucket import Bucket, FlatBuffers
from lightning_dear.collectives.work import Collectives
from lightning_dear.engine.bucket_round import LATE, UNUSED, USED, BucketRound
from lightning_dear.planning.plan import BucketPlan
from lightning_dear.torch_modes import saves_calls


def _references_of_a_local() -> int:
    only_here = object()
    return getrefcount(only_here)


_OF_A_LOCAL = _references_of_a_local()
"""Differs between versions of Python."""


def _most_held(bucket: Bucket) -> int:
    """Most elements of a gradient that is held until its bucket is full."""
    if saves_calls(bucket.parameters.device):
        # All of a large bucket would take much memory.
        return 1 << (20 if bucket.parameters.numel() > 1 << 24 else 24)
    # A longer one takes longer to copy than a call, and would have left the cache.
    return 1 << 12


class GradientCollector:
    """Copies gradients into their buckets in backward, scaled, and says which buckets are full.

    A gradient is taken at the last call of its hook that the first step recorded. Small gradients
    are held until their bucket is full, and then copied by one call. A gradient that comes after
    its bucket was launched is late: it stays in `.grad` for another round.

    Args:
        flat: Where gradients go.
        names: Of the parameters, for messages.
        expected: How often each parameter's gradient is accumulated in one backward, as recorded.
        plan: In which order buckets are launched.
        bucket_round: Told which buckets are full.
        collectives: What moves them.
    """

    def __init__(
        self,
        flat: FlatBuffers,
        names: Sequence[str],
        expected: Sequence[int],
        plan: BucketPlan,
        bucket_round: BucketRound,
        collectives: Collectives,
    ) -> None:
        self._placements, self._buckets = flat.placements, flat.buckets
        self._names, self._expected = names, expected
        self._round, self._collectives = bucket_round, collectives
        self._num_tensors = [len(bucket.spec.slices) for bucket in flat.buckets]
        turns = {number: turn for turn, number in enumerate(plan.reduce_order)}
        # For each parameter: how many buckets are launched before the first one that holds it. Once
        # more than that are launched, its gradient is late.
        self._turns = [min(map(turns.__getitem__, one.buckets)) for one in flat.placements]
        most = [_most_held(bucket) for bucket in flat.buckets]
        self._may_be_held = [
            len(one.buckets) == 1 and one.parameter.numel() <= most[one.buckets[0]]
            for one in flat.placements
        ]
        self.begin()

    def begin(self) -> None:
        """A round begins: no gradient of it is in a bucket."""
        # How often each parameter's gradient was accumulated, and whether it lies in its buckets.
        self._num_calls = [0] * len(self._placements)
        self._is_collected = [False] * len(self._placements)
        # How many tensors each bucket still lacks.
        self._num_missing = list(self._num_tensors)
        # Number of a bucket -> (place in it, gradient), to be copied by one call when it is full.
        self._held: dict[int, list[tuple[Tensor, Tensor]]] = {}
        # Gradients that were copied on another stream, until the round is over.
        self._kept: list[Tensor] = []

    # --- in backward ----------------------------------------------------------------------------

    def on_gradient(self, index: int) -> None:
        """Takes parameter `index`'s `.grad`, if this is the last time that it was accumulated.

        Raises:
            RuntimeError: If the gradient is late where reading flags would stop the host (NCCL), so
                that no rank knows whether others need another round, too.
        """
        if self._round.has_means or len(self._round.launched) > self._turns[index]:
            self._check_may_be_late(index)
            return
        self._num_calls[index] += 1
        if self._num_calls[index] < self._expected[index]:
            return
        self._round.written_on.add(self._collectives.streams.current())
        self._collect(index)

    def _check_may_be_late(self, index: int) -> None:
        if self._round.has_means or self._collectives.wait_blocks_host:
            return
        raise RuntimeError(
            f"A second gradient for '{self._names[index]}' arrived after the first had been"
            " reduced: this step ran backward through it more often than the first step did."
            " Run every backward but the step's last one in"
            " `with trainer.strategy.block_backward_sync():`, or"
            " `with fabric.no_backward_sync(model):`."
        )

    def _collect(self, index: int) -> None:
        placement = self._placements[index]
        parameter, home = placement.parameter, placement.gradient
        gradient, is_first = parameter.grad, not self._is_collected[index]
        if gradient is None:
            # A hook has cleared it: DistributedDataParallel averages zeros then.
            gradient = torch.zeros_like(parameter)
        if gradient.is_sparse:
            raise RuntimeError(
                f"'{self._names[index]}' has a sparse gradient, which strategy='dear' does not"
                " reduce; use sparse=False in its embedding."
            )
        if home is not None:
            parameter.grad = None
            # If somebody else has it too, it may be changed until the bucket is full.
            is_ours = not gradient.requires_grad and getrefcount(gradient) <= _OF_A_LOCAL
            if not is_first:
                self._copy_held(placement.buckets[0])
                self._collectives.streams.follow(self._round.written_on)
                home.add_(gradient, alpha=self._round.weight.scale)
            elif is_ours and self._may_be_held[index] and gradient.dtype == home.dtype:
                self._held.setdefault(placement.buckets[0], []).append((home, gradient))
            else:
                torch.mul(gradient, self._round.weight.scale, out=home)
        if is_first:
            self._is_collected[index] = True
            for number in placement.buckets:
                self._num_missing[number] -= 1
                if not self._num_missing[number]:
                    self._copy_held(number)
                    self._round.mark_full(number)

    def _copy_held(self, number: int) -> None:
        """Copies what is held of bucket `number` into it."""
        if (held := self._held.pop(number, None)) is None:
            return
        scale = self._round.weight.scale
        self._collectives.streams.follow(self._round.written_on)
        homes, gradients = map(list, zip(*held, strict=True))
        # The same numbers either way. Not scaled in place: a CPU rounds the factor first then.
        if len(held) == self._num_tensors[number]:
            torch._foreach_copy_(homes, gradients)
            self._buckets[number].gradients.mul_(scale)
        else:
            torch._foreach_copy_(homes, torch._foreach_mul(gradients, scale))
        # Of several streams, one must not write yet to what another one reads.
        streams = self._round.written_on | self._collectives.streams.readers
        self._kept += gradients if len(streams) > 1 else []

    # --- after backward -------------------------------------------------------------------------

    def collect_rest(self) -> list[int]:
        """Takes what hooks have not brought, and writes zeros where there is no gradient.

        Clears `.grad` of parameters that have a place in a bucket. Afterwards all buckets may be
        launched.

        Returns:
            For each parameter UNUSED, USED or LATE.
        """
        num_launched = len(self._round.launched)
        late = set[int]()
        for index, placement in enumerate(self._placements):
            # Nobody but the parameter refers to the gradient here, so that it may be held.
            if placement.parameter.grad is not None:
                if num_launched > self._turns[index]:
                    late.add(index)
                else:
                    self._collect(index)
            elif not self._is_collected[index] and placement.gradient is not None:
                placement.gradient.zero_()
        for number in tuple(self._held):
            self._copy_held(number)
        counts = bool(self._round.weight.own)
        says = [USED if counts and one else UNUSED for one in self._is_collected]
        for index in late:
            says[index] = LATE
        return says
