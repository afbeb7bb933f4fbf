"""The dense exchange: gradients and parameters travel as they are."""

from __future__ import annotations

from lightning_dear.bucket import Bucket
from lightning_dear.work import Collectives, Work


class DenseExchange:
    """Reduces and gathers buckets without compression.

    Args:
        collectives: What moves the bytes.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def launch_reduce(self, bucket: Bucket) -> Work:
        """Starts summing the bucket's gradients; after `wait`, its gradient shard is the mean."""
        return self._collectives.launch_reduce_scatter(
            bucket.gradients, bucket.received, bucket.number
        )

    def launch_gather(self, bucket: Bucket) -> Work:
        """Starts filling the bucket's parameters from every rank's shard, in place."""
        return self._collectives.launch_all_gather(bucket.parameters, bucket.number)
