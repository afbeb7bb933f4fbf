"""The dense exchange: gradients and parameters travel as they are.

A bucket that is all-reduced gives every rank the whole mean gradient at once, by the backend's own
all-reduce, as DistributedDataParallel does it; nothing of it travels back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from typing_extensions import override

from lightning_dear.bucket import Bucket
from lightning_dear.collectives.work import GRADIENT_NUMBERS, Collectives, Work
from lightning_dear.exchange.base import Exchange


class DenseExchange(Exchange):
    """Reduces and gathers buckets without compression.

    Exchanges that encode have one, for what they leave as it is.

    Args:
        collectives: See `Exchange`.
        first_number: See `Exchange`.
        is_of_gradients: Whether mean gradients are gathered instead of parameters (the paper).
    """

    def __init__(
        self, collectives: Collectives, first_number: int = 0, *, is_of_gradients: bool = False
    ) -> None:
        super().__init__(collectives, first_number)
        self._is_of_gradients = is_of_gradients

    @override
    def expect_reduce(self, bucket: Bucket) -> None:
        # An all-reduce has receives of its own.
        if not bucket.is_all_reduced:
            number = self.first_number + bucket.number
            self.collectives.expect_reduce_scatter(bucket.received, number)

    @override
    def launch_reduce(self, bucket: Bucket) -> Work:
        number = self.first_number + bucket.number
        if bucket.is_all_reduced:
            if bucket.has_master:
                # Summed in fp32 as by a reduce-scatter; older gloos know no bf16.
                bucket.mean.copy_(bucket.gradients)
            return self.collectives.launch_all_reduce(bucket.mean, number)
        return self.collectives.launch_reduce_scatter(
            bucket.gradients, bucket.received, bucket.mean, number
        )

    @override
    def expect_gather(self, bucket: Bucket) -> None:
        if not bucket.is_all_reduced:
            number = self.first_number + bucket.number
            self.collectives.expect_all_gather(self._gathered(bucket), number)

    @override
    def prepare_gather(self, bucket: Bucket) -> Callable[[], Work]:
        if not self._is_of_gradients:
            bucket.publish()
        return partial(self._gather, bucket)

    def _gather(self, bucket: Bucket) -> Work:
        if bucket.is_all_reduced:
            return Work.done()
        number = self.first_number + bucket.number
        work = self.collectives.launch_all_gather(self._gathered(bucket), number)
        is_staged = bucket.is_staged and not self._is_of_gradients
        return Work(work.wait, bucket.land) if is_staged else work

    def _gathered(self, bucket: Bucket) -> Tensor:
        """What every rank's part is written into, in place."""
        # Gradients that are reduced already, but for this rank's part, are of no use any more.
        return bucket.gradients if self._is_of_gradients else bucket.landing

    @override
    def launch_gather_gradients(self, bucket: Bucket) -> Work:
        if bucket.is_all_reduced:
            return Work.done()
        number = self.first_number + bucket.number + GRADIENT_NUMBERS
        return self.collectives.launch_all_gather(bucket.gradients, number)
