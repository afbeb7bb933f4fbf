"""The exchange for `gather="gradients"`: what travels back is the mean gradient, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from typing_extensions import override

from lightning_dear.bucket import Bucket
from lightning_dear.collectives.work import Work
from lightning_dear.exchange.dense import DenseExchange


class GradientExchange(DenseExchange):
    """Reduces buckets, and gathers their mean gradients instead of their parameters (the paper)."""

    @override
    def expect_gather(self, bucket: Bucket) -> None:
        """Lets others' means arrive in the bucket's gradients, which are reduced already."""
        number = self._first_number + bucket.number
        if not bucket.is_all_reduced:
            self._collectives.expect_all_gather(bucket.gradients, number)

    @override
    def prepare_gather(self, bucket: Bucket) -> Callable[[], Work]:
        return partial(self._gather, bucket)

    @override
    def _gather(self, bucket: Bucket) -> Work:
        """Starts filling the bucket's gradients from every rank's mean, in place."""
        if bucket.is_all_reduced:
            return Work.done()
        number = self._first_number + bucket.number
        return self._collectives.launch_all_gather(bucket.gradients, number)
