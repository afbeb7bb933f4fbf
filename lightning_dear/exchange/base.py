"""Moving buckets as they are, and what all exchanges that encode them have in common.

What must be known before a step may count, and what this rank keeps of a bucket between steps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.bucket import Bucket, FlatBuffers
from lightning_dear.collectives.work import GRADIENT_TAGS, Collectives, T, Work
from lightning_dear.compression import Compressor
from lightning_dear.exchange.compressed_bucket import CompressedBucket
from lightning_dear.telemetry.device_work import as_device_work
from lightning_dear.torch_modes import saves_calls

LossScale = Callable[[], "Tensor | None"]
"""What gradients are multiplied by at present, as a tensor of one element; None: by nothing."""


class GradientsNotFinite(RuntimeError):
    """A rank's gradients have nan or inf in them; all ranks raise it before weights change."""


@dataclass(frozen=True)
class Traffic:
    """What an exchange moves, and by what.

    Attributes:
        collectives: What moves the bytes.
        first_tag: The number that bucket 0 has among all that travel at once, those of several
            optimizers included.
        flat: All of the plan's buckets.
        is_of_gradients: Whether mean gradients are gathered instead of parameters (the paper).
        uncompressed: Numbers of the buckets that travel as they are all the same.
        loss_scale: Asked at each encoding.
    """

    collectives: Collectives
    first_tag: int
    flat: FlatBuffers
    is_of_gradients: bool
    uncompressed: Collection[int] = ()
    loss_scale: LossScale = lambda: None


class Exchange:
    """Moves buckets: gradients to their owners, and back what these make of them.

    As they are, but where a subclass encodes them. A bucket that is all-reduced gives every rank
    the whole mean gradient at once, by the backend's own all-reduce, as DistributedDataParallel
    does it; nothing of it travels back.

    Args:
        traffic: What is moved.

    Attributes:
        collectives: See `Traffic`.
        first_tag: See `Traffic`.
        coded: What encoding keeps of each bucket, in the order of the buckets; of none if nothing
            is encoded.
    """

    def __init__(self, traffic: Traffic) -> None:
        self.collectives, self.first_tag = traffic.collectives, traffic.first_tag
        self._is_of_gradients = traffic.is_of_gradients
        self.coded: Sequence[CompressedBucket] = ()

    def tag_of(self, bucket: Bucket) -> int:
        """The bucket's among all that travel at once."""
        return self.first_tag + bucket.number

    # --- the two halves ---------------------------------------------------------------------------

    def reduce_calls(self, bucket: Bucket) -> Sequence[str]:
        """Names of what is launched to reduce the bucket: in `launch_reduce`, then in its wait."""
        return ["all_reduce" if bucket.role.is_all_reduced else "reduce_scatter"]

    def calls_behind_sums(self) -> Sequence[str]:
        """Names of what the last `note_used` has launched, of all buckets together."""
        return []

    def expect_reduce(self, bucket: Bucket) -> None:
        """Lets others' gradients arrive from now on; `launch_reduce` must follow."""
        # An all-reduce has receives of its own.
        if not bucket.role.is_all_reduced:
            self.collectives.expect_reduce_scatter(bucket.received, self.tag_of(bucket))

    def launch_reduce(self, bucket: Bucket) -> Work:
        """Starts summing the bucket's gradients; after `wait`, its `mean` is there."""
        if bucket.role.is_all_reduced:
            if bucket.role.has_master:
                # Summed in fp32 as by a reduce-scatter; older gloos know no bf16.
                bucket.mean.copy_(bucket.gradients)
            return self.collectives.launch_all_reduce(bucket.mean, self.tag_of(bucket))
        buffers = bucket.gradients, bucket.received, bucket.mean
        return self.collectives.launch_reduce_scatter(*buffers, self.tag_of(bucket))

    def expect_gather(self, bucket: Bucket) -> None:
        """Lets what is gathered arrive, where nobody may read it before `launch_gather`."""
        if not bucket.role.is_all_reduced:
            self.collectives.expect_all_gather(self._gathered(bucket), self.tag_of(bucket))

    def prepare_gather(self, bucket: Bucket) -> Callable[[], Work]:
        """Does what has to be done here and now; what is returned starts the gather, later.

        After its `wait`, the bucket's parameters have the new values, or its gradients the mean.
        """
        if not self._is_of_gradients:
            bucket.publish()
        return partial(self._gather, bucket)

    def _gather(self, bucket: Bucket) -> Work:
        if bucket.role.is_all_reduced:
            return Work.done()
        tag = self.tag_of(bucket)
        work = self.collectives.launch_all_gather(self._gathered(bucket), tag)
        return work.then(bucket.land) if bucket.role.is_staged else work

    def _gathered(self, bucket: Bucket) -> Tensor:
        """What every rank's part is written into, in place."""
        # Gradients that are reduced already, but for this rank's part, are of no use any more.
        return bucket.gradients if self._is_of_gradients else bucket.landing

    def launch_gather(self, bucket: Bucket) -> Work:
        """Starts to gather what completes `bucket`. Does not block."""
        return self.prepare_gather(bucket)()

    def launch_gather_gradients(self, bucket: Bucket) -> Work:
        """Starts filling the bucket's gradients from every rank's mean, in place."""
        if bucket.role.is_all_reduced:
            return Work.done()
        tag = self.tag_of(bucket) + GRADIENT_TAGS
        return self.collectives.launch_all_gather(bucket.gradients, tag)

    def sync(self, bucket: Bucket) -> None:
        """Gathers stepped shards that replicas are behind of, as they are. Collective, blocks."""
        if bucket.role.lags:
            Exchange.prepare_gather(self, bucket)().wait()
            bucket.note_published()

    # --- what only some have to do, and then between the halves -----------------------------------

    def take_found_inf(self) -> Tensor | bool:
        """Whether a gradient that was reduced since the last call was nan or inf. Local."""
        return False

    def hear_found_inf(self, found: Tensor) -> None:
        """Told whether any rank found one."""
        # Where gradients travel as they are, it shows in the mean.

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

    # --- around a step ----------------------------------------------------------------------------

    @property
    def compression_ratio(self) -> float:
        """Bytes of both halves as they are, over those that travel, of two hops between hosts."""
        return 1.0

    def use(self, compressor: Compressor, *, is_idle: bool = True) -> None:
        """Encodes with another codec from now on, or from the next `commit` or `discard` on.

        Args:
            compressor: Which one.
            is_idle: Whether nothing has been reduced, or is about to arrive, since the last of
                those.

        Raises:
            ValueError: Where nothing is encoded.
        """
        raise ValueError(
            f"Nothing encodes, so that {compressor.name} cannot replace it: set compressor=."
        )

    def check(self) -> None:
        """Raises `RuntimeError` if the step cannot be made with what was reduced."""

    def commit(self) -> None:
        """Told that the step was made of what was reduced."""

    def discard(self) -> None:
        """Told that what was reduced since the last step is void."""


@dataclass(frozen=True)
class Sending:
    """What is to be done once a bucket is encoded.

    Attributes:
        launch: Starts sending it. Does not block.
        decode: What an accelerator does of what has arrived; None: nothing.
    """

    launch: Callable[[], Work]
    decode: Callable[[], None] | None = None


class CompressedExchange(Exchange, ABC):
    """Looks at gradients before they are encoded, and keeps residuals only if a step was made.

    Args:
        traffic: What is moved.
        compressor: What encodes.
    """

    def __init__(self, traffic: Traffic, compressor: Compressor) -> None:
        super().__init__(traffic)
        self._compressor, self._loss_scale = compressor, traffic.loss_scale
        # Largest number that may be sent -> largest ones that were to be, of each bucket.
        self._found: dict[float, list[Tensor]] = {}
        # What waits for gradients that are encoded behind a host's sum; the host, or the stream.
        self._encoding: list[Callable[[], object]] = []
        self._refusal: RuntimeError | None = None
        self._is_nan: Tensor | None = None
        self._next: Compressor | None = None

    # --- the reduce half --------------------------------------------------------------------------

    @override
    def launch_reduce(self, bucket: Bucket) -> Work:
        """Encodes the bucket's gradients and starts sending that. Does not block."""
        return self._encode_now(bucket, partial(self._encode, bucket, self._loss_scale()))()

    @abstractmethod
    def _encode(self, bucket: Bucket, scale: Tensor | None) -> Sending:
        """Encodes the bucket's gradients, which come multiplied by `scale`."""

    def _encode_now(
        self, bucket: Bucket | None, encode: Callable[[], Sending]
    ) -> Callable[[], Work]:
        """Encodes here and now; what is returned starts sending that, and lets it be decoded.

        Of one bucket, or of all.
        """
        return partial(self._launch, bucket, self._as_device_work("encode", bucket, encode))

    def _launch(self, bucket: Bucket | None, sending: Sending) -> Work:
        work = sending.launch()
        if sending.decode is None:
            return work
        return work.then(partial(self._as_device_work, "decode", bucket, sending.decode))

    def _as_device_work(
        self, lane: str, bucket: Bucket | None, work: Callable[..., T], *args: Any
    ) -> T:
        """Encodes or decodes here and now; see `as_device_work`."""
        tag = None if bucket is None else self.tag_of(bucket)
        return as_device_work(self.collectives, lane, tag, work, *args)

    # --- gradients that are not finite ------------------------------------------------------------

    def _look_for_inf(self, rows: Tensor, largest: float = math.inf) -> None:
        most = min(largest, torch.finfo(rows.dtype).max)
        self._found.setdefault(most, []).append(largest_of(rows))

    @override
    def take_found_inf(self) -> Tensor | bool:
        encoding, self._encoding = self._encoding, []
        for end in encoding:
            end()
        found, self._found = self._found, {}
        are_small = [torch.stack(ones) <= most for most, ones in found.items()]
        if encoding:
            # What was found beside may be free from here on.
            self.collectives.streams.lead_readers()
        return ~torch.cat(are_small).all() if are_small else False

    @override
    def hear_found_inf(self, found: Tensor) -> None:
        """Makes all means nan, so that a loss scale backs off; `check` refuses the step without.

        Where the host would have to wait for that, what is decoded becomes nan instead.
        """
        is_host = found.is_cpu and self.collectives.streams.current() is None
        if self.collectives.wait_blocks_host and is_host:
            if not found:
                return
            self._refusal = GradientsNotFinite(
                "A rank's gradients, or a host's sum of them, have nan or inf in them, which"
                f" compressor={self._compressor.name!r} cannot send, or would keep."
                f"{self._compressor.overflows} No weight has"
                " changed, and no residual. Find the operation with Trainer(detect_anomaly=True),"
                " or the hook that changes gradients; lower the learning rate or clip gradients, or"
                " use precision='16-mixed', which leaves such steps out."
            )
        else:
            is_nan = found.bool()
            self._is_nan = is_nan if self._is_nan is None else self._is_nan | is_nan
        one_or_nan = torch.where(found.view(()).bool(), math.nan, 1.0)
        torch._foreach_mul_([coded.bucket.mean for coded in self.coded], one_or_nan)

    @override
    def look_again(self) -> None:
        self._look_at_means()

    def _look_at_means(self, says: Tensor | None = None) -> Tensor:
        """Whether any rank has found inf in a mean, and whether any `says` so: [2] uint8."""
        for coded in self.coded:
            self._look_for_inf(coded.bucket.mean)
        flags = torch.zeros(2, dtype=torch.uint8, device=self.coded[0].bucket.mean.device)
        flags[0] = self.take_found_inf()
        if says is not None:
            flags[1] = says
        self.collectives.launch_max(flags).wait()
        self.hear_found_inf(flags[0])
        return flags

    @override
    def check(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    @override
    def use(self, compressor: Compressor, *, is_idle: bool = True) -> None:
        """Encodes with another codec, from the next reduction on. All ranks, all alike.

        It must need of what is kept between steps what the first codec has, or be `Fp32`. Buckets
        with another codec than the first keep theirs, but for `Fp32`.
        """
        self._next = None if is_idle else compressor
        for coded in self.coded if is_idle else ():
            follows = coded.configured == self._compressor or compressor.is_identity
            coded.use(compressor if follows else coded.configured)

    # --- around a step --------------------------------------------------------------------------

    @override
    def note_used(self, used: Sequence[bool], *, keeps: bool) -> None:
        scale = None if all(used) else self._loss_scale()
        for coded in self.coded:
            coded.note_used(used, scale, keeps=keeps)

    @override
    def commit(self) -> None:
        for coded in self.coded:
            coded.commit()
        self._begin_anew()

    @override
    def discard(self) -> None:
        for coded in self.coded:
            coded.discard()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._refusal = self._is_nan = None
        self._encoding = []
        if self._next is not None:
            self.use(self._next)


def largest_of(numbers: Tensor) -> Tensor:
    """The largest absolute value, or nan if there is one; a tensor: a device is not waited for."""
    if not saves_calls(numbers.device):
        low, high = numbers.aminmax()
        return torch.maximum(low.abs_(), high.abs_())
    return torch.linalg.vector_norm(numbers, math.inf)  # type: ignore[no-any-return]
