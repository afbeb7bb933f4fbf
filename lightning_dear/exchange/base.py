"""What the engine asks of an exchange, whatever travels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from torch import Tensor

from lightning_dear.bucket import Bucket
from lightning_dear.collectives.work import Collectives, Work
from lightning_dear.compression import Compressor
from lightning_dear.exchange.compressed_bucket import CompressedBucket


class Exchange(ABC):
    """Moves buckets: gradients to their owners, and back what these make of them.

    Args:
        collectives: What moves the bytes.
        first_number: The number that bucket 0 has among all that travel at once, those of several
            optimizers included.

    Attributes:
        collectives: See above.
        first_number: See above.
        coded: What encoding keeps of each bucket, in the order of the buckets; of none if nothing
            is encoded.
    """

    def __init__(self, collectives: Collectives, first_number: int = 0) -> None:
        self.collectives, self.first_number = collectives, first_number
        self.coded: Sequence[CompressedBucket] = ()

    # --- the two halves ---------------------------------------------------------------------------

    @abstractmethod
    def expect_reduce(self, bucket: Bucket) -> None:
        """Lets others' gradients arrive from now on; `launch_reduce` must follow."""

    @abstractmethod
    def launch_reduce(self, bucket: Bucket) -> Work:
        """Starts summing the bucket's gradients; after `wait`, its `mean` is there."""

    @abstractmethod
    def expect_gather(self, bucket: Bucket) -> None:
        """Lets what is gathered arrive, where nobody may read it before `launch_gather`."""

    @abstractmethod
    def prepare_gather(self, bucket: Bucket) -> Callable[[], Work]:
        """Does what has to be done here and now; what is returned starts the gather, later.

        After its `wait`, the bucket's parameters have the new values, or its gradients the mean.
        """

    def launch_gather(self, bucket: Bucket) -> Work:
        """Starts to gather what completes `bucket`. Does not block."""
        return self.prepare_gather(bucket)()

    @abstractmethod
    def launch_gather_gradients(self, bucket: Bucket) -> Work:
        """Starts filling the bucket's gradients from every rank's mean, in place."""

    def sync(self, bucket: Bucket) -> Work:
        """Starts gathering stepped shards that replicas are behind of. All ranks call."""
        return Work.done()

    # --- what only some have to do, and then between the halves -----------------------------------

    def take_found_inf(self) -> Tensor | bool:
        """Whether a gradient that was reduced since the last call was nan or inf. Local."""
        return False

    def hear_found_inf(self, found: Tensor) -> None:
        """Told whether any rank found one."""
        # Where gradients travel as they are, it shows in the mean.
        return

    def look_again(self) -> None:
        """As the two above, of means that a hook may have changed. All ranks call; may block."""
        return

    @property
    def voting(self) -> AbstractSet[int]:
        """Numbers of the buckets in which every rank has a vote, and none can abstain."""
        return frozenset()

    def refuse_votes(self, names: Sequence[str]) -> None:
        """Told, as all ranks are, of parameters in them that not every rank has a gradient for."""
        return

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
        return

    # --- around a step ----------------------------------------------------------------------------

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
            ValueError: Where nothing is encoded.
        """
        raise ValueError(
            f"Nothing encodes, so that {codec.name} cannot replace it: set compressor=."
        )

    def check(self) -> None:
        """Raises `RuntimeError` if the step cannot be made with what was reduced."""
        return

    def commit(self) -> None:
        """Told that the step was made of what was reduced."""
        return

    def discard(self) -> None:
        """Told that what was reduced since the last step is void."""
        return
