"""Copies the gradients that autograd produces into buckets."""

from collections.abc import Sequence
from sys import getrefcount

import torch
from torch import Tensor

from lightning_dear.bucket import Bucket
from lightning_dear.engine.bucket_round import LATE, UNUSED, USED, BucketRound
from lightning_dear.torch_modes import saves_calls


def _references_of_a_local() -> int:
    only_here = object()
    return getrefcount(only_here)


_OF_A_LOCAL = _references_of_a_local()
"""What `getrefcount` returns for an object that only one local variable refers to. It differs
between versions of Python."""


def _most_held(bucket: Bucket) -> int:
    """Number of elements up to which a gradient is held until its bucket is full.

    Then all held gradients are copied into the bucket by one call. A longer gradient is copied into
    it as soon as autograd has produced it.
    """
    if saves_calls(bucket.parameters.device):
        # On an accelerator each call costs a kernel launch. But to hold all gradients of a large
        # bucket would take much memory.
        return 1 << (20 if bucket.parameters.numel() > 1 << 24 else 24)
    # On a CPU, copying a gradient longer than this takes longer than the call that is saved. Held
    # until later it would have left the cache.
    return 1 << 12


def sparse_gradient(name: str) -> RuntimeError:
    """Returns the error for a sparse gradient of the parameter of that name."""
    return RuntimeError(
        f"'{name}' has a sparse gradient, which strategy='dear' does not reduce. Use sparse=False"
        " in its embedding, or freeze it."
    )


class GradientCollector:
    """Copies gradients, times `BatchWeights.scale`, into buckets, and marks full ones in the round.

    The step's gradient hooks call it in backward. It reads `.grad`, and knows nothing of
    optimizers and plans to come.

    A hook may be called several times for one parameter in one backward. The gradient is taken at
    the last of these calls; their number is known from the recorded step. Small gradients are held
    until their bucket is full, and then copied by one call.

    A gradient is late if it comes after its bucket was launched. On gloo it stays in `.grad` for
    another round. On NCCL it is refused.

    Args:
        expected: For each parameter how often its hook is called in one backward, as recorded.
        bucket_round: The round that launches buckets and knows which were launched.
    """

    def __init__(self, expected: Sequence[int], bucket_round: BucketRound) -> None:
        flat = bucket_round.flat
        self._placements, self._buckets = flat.placements, flat.buckets
        self._names, self._expected = bucket_round.names, expected
        self._round, self._collectives = bucket_round, bucket_round.exchange.collectives
        self._num_tensors = [len(bucket.spec.slices) for bucket in flat.buckets]
        turns = {number: turn for turn, number in enumerate(bucket_round.order)}
        # For each parameter: how many buckets are launched before the first bucket that holds it.
        # Once more buckets than that are launched, a gradient of the parameter is late.
        self._turns = [min(map(turns.__getitem__, one.buckets)) for one in flat.placements]
        most = [_most_held(bucket) for bucket in flat.buckets]
        self._may_be_held = [
            len(one.buckets) == 1 and one.parameter.numel() <= most[one.buckets[0]]
            for one in flat.placements
        ]
        self.begin()

    def begin(self) -> None:
        """Begins a round: forgets which gradients were taken. Buckets count as empty."""
        # For each parameter: calls of its hook, and whether its gradient was taken.
        self._num_calls = [0] * len(self._placements)
        self._is_collected = [False] * len(self._placements)
        # For each bucket: number of tensors whose gradient was not taken yet.
        self._num_missing = list(self._num_tensors)
        # Bucket number -> (view of the bucket, gradient) of each held gradient of the bucket.
        self._held: dict[int, list[tuple[Tensor, Tensor]]] = {}
        # Gradients that were copied, but that a stream may still read: their memory must not be
        # reused before the round ends.
        self._kept: list[Tensor] = []

    # --- in backward ----------------------------------------------------------------------------

    def on_gradient(self, index: int) -> None:
        """Takes the `.grad` of parameter `index`, at the last call expected for it in a backward.

        Takes nothing at earlier calls, nor if the gradient is late, nor if means of an earlier
        round of the step are there. Then `.grad` keeps it for `collect_rest`.

        Raises:
            RuntimeError: If the gradient is late on NCCL. To read flags would block the host there,
                so other ranks would not learn of another round. Also if the gradient is sparse.
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
            f"A second gradient for '{self._names[index]}' arrived after the first had been reduced"
            " over ranks. Add up the step's losses and run one backward. Or call"
            " self.manual_backward(loss) or fabric.backward(loss), and all but the step's last in"
            " `with trainer.strategy.block_backward_sync():` or"
            " `with fabric.no_backward_sync(model):`. To change `.grad` yourself, use"
            " `with trainer.strategy.whole_gradients():`. Other ranks would not send a second time."
        )

    def _collect(self, index: int) -> None:
        placement = self._placements[index]
        parameter, home = placement.parameter, placement.gradient
        gradient, is_first = parameter.grad, not self._is_collected[index]
        if gradient is None:
            # A hook has cleared `.grad`. DistributedDataParallel averages zeros then.
            gradient = torch.zeros_like(parameter)
        if gradient.is_sparse:
            raise sparse_gradient(self._names[index])
        if home is not None:
            parameter.grad = None
            # A gradient that other code refers to is copied at once: that code could change it
            # before the bucket is full.
            is_ours = not gradient.requires_grad and getrefcount(gradient) <= _OF_A_LOCAL
            if not is_first:
                self._copy_held(placement.buckets[0])
                self._collectives.streams.follow(self._round.written_on)
                # `alpha` must be a number, and to read a tensor would block the host.
                if isinstance(scale := self._round.weights.scale, Tensor):
                    home.add_(gradient * scale)
                else:
                    home.add_(gradient, alpha=scale)
            elif is_ours and self._may_be_held[index] and gradient.dtype == home.dtype:
                self._held.setdefault(placement.buckets[0], []).append((home, gradient))
            else:
                torch.mul(gradient, self._round.weights.scale, out=home)
        if is_first:
            self._is_collected[index] = True
            for number in placement.buckets:
                self._num_missing[number] -= 1
                if not self._num_missing[number]:
                    self._copy_held(number)
                    self._round.mark_full(number)

    def _copy_held(self, number: int) -> None:
        """Copies the held gradients of bucket `number` into it, times `BatchWeights.scale`.

        Does nothing if none is held.
        """
        if (held := self._held.pop(number, None)) is None:
            return
        scale = self._round.weights.scale
        self._collectives.streams.follow(self._round.written_on)
        homes, gradients = map(list, zip(*held, strict=True))
        # Both branches give the same bits as `torch.mul`. The in-place `_foreach_mul_` would not:
        # on a CPU it rounds the factor.
        if len(held) == self._num_tensors[number]:
            torch._foreach_copy_(homes, gradients)
            self._buckets[number].gradients.mul_(scale)
        else:
            torch._foreach_copy_(homes, torch._foreach_mul(gradients, scale))
        # With several streams, freed memory of gradients could be overwritten by another stream
        # while this copy still reads it. `begin` frees it.
        streams = self._round.written_on | self._collectives.streams.readers
        self._kept += gradients if len(streams) > 1 else []

    # --- after backward -------------------------------------------------------------------------

    def collect_rest(self) -> list[int]:
        """Takes gradients that no hook call has taken, and writes zeros where there is no gradient.

        Late gradients stay in `.grad`. For others, `.grad` becomes None if they have a place in a
        bucket. Afterwards all buckets may be launched.

        Returns:
            This rank's flag for each parameter: UNUSED, USED or LATE.

        Raises:
            RuntimeError: If a gradient is late on NCCL; see `on_gradient`.
        """
        num_launched = len(self._round.launched)
        late = set[int]()
        for index, placement in enumerate(self._placements):
            # `_collect` holds a gradient only if nothing else refers to it, as a local variable
            # here would.
            if placement.parameter.grad is not None:
                if num_launched > self._turns[index]:
                    self._check_may_be_late(index)
                    late.add(index)
                else:
                    self._collect(index)
            elif not self._is_collected[index] and placement.gradient is not None:
                placement.gradient.zero_()
        for number in tuple(self._held):
            self._copy_held(number)
        counts = bool(self._round.weights.own)
        says = [USED if counts and is_here else UNUSED for is_here in self._is_collected]
        for index in late:
            says[index] = LATE
        return says
