"""Exchanges for `gather="gradients"`: what travels back is the mean gradient, or nothing."""

from __future__ import annotations

from typing_extensions import override

from lightning_dear.bucket import Bucket
from lightning_dear.exchange.dense import DenseExchange
from lightning_dear.work import Work


class GradientExchange(DenseExchange):
    """Reduces buckets, and gathers their mean gradients instead of their parameters (the paper)."""

    @override
    def expect_gather(self, bucket: Bucket) -> None:
        """Lets others' means arrive in the bucket's gradients, which are reduced already."""
        number = self._first_number + bucket.number
        self._collectives.expect_all_gather(bucket.gradients, number)

    @override
    def launch_gather(self, bucket: Bucket) -> Work:
        """Starts filling the bucket's gradients from every rank's mean, in place."""
        number = self._first_number + bucket.number
        return self._collectives.launch_all_gather(bucket.gradients, number)


class AllReduceExchange(DenseExchange):
    """Gives every rank the whole mean gradient at once, by the backend's own all-reduce.

    Wait-free backpropagation without decoupling, as DistributedDataParallel and MG-WFBP do it.
    """

    @override
    def expect_reduce(self, bucket: Bucket) -> None:
        """Nothing: the backend's all-reduce has receives of its own."""

    @override
    def expect_gather(self, bucket: Bucket) -> None:
        """Nothing is gathered."""

    @override
    def launch_reduce(self, bucket: Bucket) -> Work:
        """Starts summing the bucket's gradients, in place and on every rank."""
        number = self._first_number + bucket.number
        return self._collectives.launch_all_reduce(bucket.gradients, number)

    @override
    def launch_gather(self, bucket: Bucket) -> Work:
        """Nothing: every rank has stepped the whole bucket."""
        return Work.done()

    @override
    def launch_gather_gradients(self, bucket: Bucket) -> Work:
        """Nothing: every rank has the whole mean."""
        return Work.done()
