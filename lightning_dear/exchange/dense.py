"""The dense exchange: gradients and parameters travel as they are.

A bucket that is all-reduced gives every rank the whole mean gradient at once, by the backend's own
all-reduce, as DistributedDataParallel does it; nothing of it travels back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial

from torch import Tensor
from typing_extensions import override

from lightning_dear.bucket import Bucket
from lightning_dear.collectives.work import GRADIENT_NUMBERS, Collectives, Work
from lightning_dear.compression import Compressor
from lightning_dear.exchange.compressed_bucket import CompressedBucket


class DenseExchange:
    """Reduces and gathers buckets without compression.

    Args:
        collectives: What moves the bytes.
        first_number: The number that bucket 0 has among all that travel at once, those of several
            optimizers included.

    Attributes:
        coded: What encoding keeps of each bucket, in the order of the buckets; here nothing.
    """

    def __init__(self, collectives: Collectives, first_number: int = 0) -> None:
        self.coded: Sequence[CompressedBucket] = ()
        self._collectives = collectives
        self._first_number = first_number

    def launch_reduce(self, bucket: Bucket) -> Work:
        """Starts summing the bucket's gradients; after `wait`, its `mean` is there."""
        number = self._first_number + bucket.number
        if bucket.is_all_reduced:
            if bucket.has_master:
                # Summed in fp32 as by a reduce-scatter; older gloos know no bf16.
                bucket.mean.copy_(bucket.gradients)
            return self._collectives.launch_all_reduce(bucket.mean, number)
        return self._collectives.launch_reduce_scatter(
            bucket.gradients, bucket.received, bucket.mean, number
        )

    def expect_reduce(self, bucket: Bucket) -> None:
        """Lets others' gradients arrive from now on; `launch_reduce` must follow.

        An all-reduce has receives of its own.
        """
        number = self._first_number + bucket.number
        if not bucket.is_all_reduced:
            self._collectives.expect_reduce_scatter(bucket.received, number)

    def expect_gather(self, bucket: Bucket) -> None:
        """Lets others' shards arrive in `landing`, which nobody may read before `launch_gather`."""
        number = self._first_number + bucket.number
        if not bucket.is_all_reduced:
            self._collectives.expect_all_gather(bucket.landing, number)

    def launch_gather(self, bucket: Bucket) -> Work:
        """Starts to gather what completes `bucket`. Does not block."""
        return self.prepare_gather(bucket)()

    def prepare_gather(self, bucket: Bucket) -> Callable[[], Work]:
        """Does what has to be done here and now; what is returned starts the gather, later.

        After its `wait`, the bucket's parameters have the new values.
        """
        bucket.publish()
        return partial(self._gather, bucket)

    def _gather(self, bucket: Bucket) -> Work:
        """Starts filling `landing` from every rank's stepped shard, in place."""
        if bucket.is_all_reduced:
            return Work.done()
        number = self._first_number + bucket.number
        work = self._collectives.launch_all_gather(bucket.landing, number)
        return Work(work.wait, bucket.land) if bucket.is_staged else work

    def launch_gather_gradients(self, bucket: Bucket) -> Work:
        """Starts filling the bucket's gradients from every rank's mean, in place."""
        if bucket.is_all_reduced:
            return Work.done()
        number = self._first_number + bucket.number + GRADIENT_NUMBERS
        return self._collectives.launch_all_gather(bucket.gradients, number)

    # --- what an exchange that encodes has to do besides ----------------------------------------

    def take_found_inf(self) -> Tensor | bool:
        """Whether a gradient that was reduced since the last call was nan or inf. Local."""
        return False

    def hear_found_inf(self, found: Tensor) -> None:
        """Told whether any rank found one. Here they travel as they are, and show in the mean."""

    def look_again(self) -> None:
        """As the two above, of means that a hook may have changed. All ranks call; may block."""

    @property
    def voting(self) -> AbstractSet[int]:
        """Numbers of the buckets in which every rank has a vote, and none can abstain."""
        return frozenset()

    def refuse_votes(self, names: Sequence[str]) -> None:
        """Told, as all ranks are, of parameters in them that not every rank has a gradient for."""

    def add_earlier(self, bucket: Bucket, earlier: Tensor | None, *, is_empty: bool) -> None:
        """Adds to the bucket's mean what earlier rounds of the step have brought.

        Args:
            bucket: Reduced once more.
            earlier: Its mean before; None: no rank had a gradient then.
            is_empty: Whether no rank had a gradient for this round.
        """
        if earlier is not None:
            bucket.mean.add_(earlier)

    def note_used(self, used: Sequence[bool], *, keeps: bool) -> None:
        """Told which parameters will be stepped; `keeps`: see `CompressedBucket`."""

    @property
    def compression_ratio(self) -> float:
        """Bytes of both halves as they are, over those that travel."""
        return 1.0

    def use(self, codec: Compressor, *, is_idle: bool = True) -> None:
        """Encodes with another codec from now on, or from the next `commit` or `discard` on.

        Args:
            codec: Which one.
            is_idle: Whether nothing has been reduced, or is about to arrive, since the last of
                those.

        Raises:
            ValueError: Here, since nothing is encoded.
        """
        raise ValueError(
            f"Nothing encodes, so that {codec.name} cannot replace it: set compressor=."
        )

    def check(self) -> None:
        """Raises `RuntimeError` if the step cannot be made with what was reduced."""

    def commit(self) -> None:
        """Told that the step was made of what was reduced."""

    def discard(self) -> None:
        """Told that what was reduced since the last step is void."""


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
