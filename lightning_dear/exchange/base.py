"""Exchanges: the one that sends buckets uncompressed, and the base of those that compress them.

The base class `CompressedExchange` looks for inf and nan before gradients are encoded. It keeps new
residuals only if the step is made with those gradients.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear import compression, torch_modes
from lightning_dear.bucket import Bucket, FlatBuffers
from lightning_dear.collectives.work import GRADIENT_TAGS, Collectives, T, Work
from lightning_dear.exchange.compressed_bucket import CompressedBucket
from lightning_dear.telemetry.device_work import as_device_work

LossScale = Callable[[], "Tensor | None"]
"""Returns the loss scale, which gradients are multiplied by at present, as a tensor of one element.
None means that there is no loss scale."""


class GradientsNotFinite(RuntimeError):
    """Some rank's gradients have nan, inf, or values too large for the compressor.

    All ranks raise it, before any weight changes. Raised only with a compressor, and only on CPUs;
    see `CompressedExchange.hear_found_inf`.
    """


class Traffic(NamedTuple):
    """The buckets that an exchange moves, and the means to move them.

    Attributes:
        collectives: Launches the messages.
        first_tag: Message tag of bucket 0; bucket n uses `first_tag + n`. For two plans over
            the same collectives it must differ by `MAX_BUCKETS` at least.
        flat: All buckets of the plan.
        is_of_gradients: True if the gather half gathers mean gradients, False if it gathers
            parameters (the paper).
        uncompressed: Numbers of the buckets that are not compressed although there is a compressor.
        loss_scale: Returns the present loss scale. Called whenever a bucket is encoded.
        is_staged: Whether uncompressed parameters are gathered into `Bucket.gradients`, so that
            `Bucket.parameters` keeps its values until the gather's `wait` copies them there. Also
            whether the host waits for a device to know of gradients that are not finite.
    """

    collectives: Collectives
    first_tag: int
    flat: FlatBuffers
    is_of_gradients: bool
    uncompressed: Collection[int] = ()
    loss_scale: LossScale = lambda: None
    is_staged: bool = False


class Exchange:
    """Reduces gradients to the owners of shards, and gathers parameters or means from the owners.

    This class sends buckets uncompressed; subclasses compress them. A bucket that is all-reduced
    gets the whole mean gradient on every rank at once, by the backend's own all-reduce, as in
    DistributedDataParallel. For such a bucket nothing is gathered.

    Args:
        traffic: The buckets, and the collectives that move them.

    Attributes:
        collectives: Same as in `Traffic`.
        first_tag: Same as in `Traffic`.
        coded: Each bucket's compressor and residuals, in the order of bucket numbers. Empty if
            nothing is compressed.
    """

    def __init__(self, traffic: Traffic) -> None:
        self.collectives, self.first_tag = traffic.collectives, traffic.first_tag
        self._is_of_gradients, self._is_staged = traffic.is_of_gradients, traffic.is_staged
        self.coded: Sequence[CompressedBucket] = ()

    def tag_of(self, bucket: Bucket) -> int:
        """Returns the tag of the bucket's messages, which no other bucket of any optimizer has."""
        return self.first_tag + bucket.number

    # --- the two halves ---------------------------------------------------------------------------

    def expect_reduce(self, bucket: Bucket) -> None:
        """Posts the receives of the bucket's gradients. `launch_reduce` must follow.

        Does nothing for a bucket that is all-reduced, and on NCCL. Does not block.
        """
        # An all-reduce posts its own receives.
        if not bucket.role.is_all_reduced:
            self.collectives.expect_reduce_scatter(bucket.received, self.tag_of(bucket))

    def launch_reduce(self, bucket: Bucket) -> Work:
        """Starts to sum `bucket.gradients` over ranks. Collective, does not block.

        After the work's `wait`, `bucket.mean` holds the sum, which is the mean gradient, because
        ranks have weighted their gradients before: of this rank's shard or, if the bucket is
        all-reduced, of the whole bucket. The rest of `bucket.gradients` is then undefined.
        """
        if bucket.role.is_all_reduced:
            if bucket.role.has_master:
                # Summed in fp32, as a reduce-scatter sums. Older versions of gloo have no bf16.
                bucket.mean.copy_(bucket.gradients)
            return self.collectives.launch_all_reduce(bucket.mean, self.tag_of(bucket))
        buffers = bucket.gradients, bucket.received, bucket.mean
        return self.collectives.launch_reduce_scatter(*buffers, self.tag_of(bucket))

    def expect_gather(self, bucket: Bucket) -> None:
        """Posts the receives of the gather half, if the bucket is gathered. Does not block.

        From then on other ranks' shards may arrive in the memory that is gathered into, which must
        not be read before the gather has been waited for.
        """
        if not bucket.role.is_all_reduced:
            self.collectives.expect_all_gather(self._gathered(bucket), self.tag_of(bucket))

    def launch_gather(self, bucket: Bucket) -> Work:
        """Starts to gather the bucket's shards (nothing, if it is all-reduced). Does not block.

        In this class it first copies the stepped shard to the buffer that is gathered, unless
        gradients are gathered. After the work's `wait` the bucket's parameters have their new
        values or, if gradients are gathered, `bucket.gradients` holds the mean.
        """
        if self._is_staged:
            gathered, tag = self._gathered(bucket), self.tag_of(bucket)
            gathered[bucket.own].copy_(bucket.shard)
            work = self.collectives.launch_all_gather(gathered, tag)
            return work.then(partial(bucket.parameters.copy_, gathered))
        if not self._is_of_gradients:
            bucket.publish()
        if bucket.role.is_all_reduced:
            return Work.done()
        return self.collectives.launch_all_gather(self._gathered(bucket), self.tag_of(bucket))

    def _gathered(self, bucket: Bucket) -> Tensor:
        """Returns the buffer of the all-gather: every rank's shard is written into it, in place."""
        # When means are gathered, the local gradients are no longer needed: they have been reduced,
        # so that other ranks' means may overwrite them.
        return bucket.gradients if self._is_of_gradients or self._is_staged else bucket.parameters

    def launch_gather_gradients(self, bucket: Bucket) -> Work:
        """Starts to gather the means of all shards into `bucket.gradients`, uncompressed.

        Must be called before the step, by all ranks. This rank's shard of `bucket.gradients` must
        hold its mean already. Does nothing if the bucket is all-reduced. Does not block.
        """
        if bucket.role.is_all_reduced:
            return Work.done()
        tag = self.tag_of(bucket) + GRADIENT_TAGS
        return self.collectives.launch_all_gather(bucket.gradients, tag)

    def sync(self, bucket: Bucket) -> None:
        """Gathers the shards of a bucket that lags, uncompressed, so that replicas equal shards.

        Shards that are masters of 16-bit parameters are rounded. Collective, blocks. Does nothing
        for other buckets.
        """
        if bucket.role.lags:
            Exchange.launch_gather(self, bucket).wait()
            bucket.note_published()

    # --- hooks between the halves, which only some subclasses need --------------------------------

    def take_found_inf(self) -> Tensor | bool:
        """Returns whether this rank has encoded nan or inf since the last call. Local.

        A value too large for the compressor counts, too. Always False without a compressor. In two
        hops it blocks (the host, or on NCCL the stream) until the host's sums have been encoded.
        """
        return False

    def hear_found_inf(self, found: Tensor) -> None:
        """Takes the ranks' common answer: `found` is true if any rank's `take_found_inf` was."""
        # Nothing to do for uncompressed gradients, since nan or inf is in their mean.

    def look_again(self) -> None:
        """Checks means, which a hook may have changed, for nan and inf, on all ranks.

        With a compressor it is collective, and blocks (the host, or on NCCL the stream). Without
        one it does nothing.
        """

    @property
    def voting(self) -> Set[int]:
        """Numbers of the buckets whose codec votes: each rank's sign counts, and none may abstain.

        Empty unless the compressor is such a codec.
        """
        return frozenset()

    def refuse_votes(self, names: Sequence[str]) -> None:
        """Makes `check` refuse the step: some ranks have no gradient for these parameters.

        All ranks call it with the same names, of parameters in `voting` buckets.
        """

    def add_earlier(self, bucket: Bucket, earlier: Tensor | None, *, is_empty: bool) -> None:
        """Adds the mean of earlier rounds of this step to the mean of the round that has ended.

        Args:
            bucket: Bucket that was reduced in both; `bucket.mean` is mutated.
            earlier: Mean of the earlier rounds. None means that no rank had a gradient then.
            is_empty: Whether no rank had a gradient in the round that has ended.
        """
        if earlier is not None:
            bucket.mean.add_(earlier)

    def note_used(self, used: Sequence[bool], *, keeps: bool) -> None:
        """Stores which parameters are unused, so that their residuals stay unsent.

        See `CompressedBucket.note_used`. Does nothing without a compressor. All ranks must call it:
        `SparseExchange` launches collectives here, and blocks, if `keeps` is True.

        Args:
            used: By parameter index, whether any rank had a gradient.
            keeps: Whether the means of unused parameters, which are residuals that were sent, are
                put back into residuals. False leaves them: that was done before in this step.
        """

    # --- around a step ----------------------------------------------------------------------------

    @property
    def compression_ratio(self) -> float:
        """Bytes of both halves without compression, divided by those sent with it.

        In two hops only the bytes between hosts count. 1.0 without a compressor.
        """
        return 1.0

    def use(self, compressor: compression.Compressor, *, is_idle: bool = True) -> None:
        """Changes the compressor.

        The new one is used at once if `is_idle`, else from the next `commit` or `discard` on.

        Args:
            compressor: The new compressor.
            is_idle: Whether since the last `commit` or `discard` nothing was reduced, and no
                receive was posted.

        Raises:
            ValueError: If this exchange does not compress.
        """
        raise ValueError(f"{compressor.name} cannot start mid-run. Set the strategy's compressor=.")

    def check(self) -> None:
        """Raises `RuntimeError` if the compressor has refused the reduced gradients. Local.

        All ranks raise alike. The refusal ends with `commit` or `discard`.
        """

    def commit(self) -> None:
        """Keeps new residuals, since the step was made with the reduced gradients."""

    def discard(self) -> None:
        """Forgets gradients reduced since the last step, and their residuals: no step was made."""


class Sending(NamedTuple):
    """A bucket that has been encoded, or all buckets, ready to be sent.

    Attributes:
        launch: Launches the message, if there is one. Later messages are sent by the `wait` of its
            work. Does not block, except in `SparseExchange.note_used`.
        decode: Decodes what has arrived, and is recorded as device work. None means that nothing is
            to be decoded.
    """

    launch: Callable[[], Work]
    decode: Callable[[], None] | None = None


class CompressedExchange(Exchange, ABC):
    """Checks gradients for nan and inf before encoding, and commits residuals with the step.

    Args:
        traffic: The buckets, and the collectives that move them.
        compressor: Compressor of the strategy. A subclass may use others for some buckets.
    """

    def __init__(self, traffic: Traffic, compressor: compression.Compressor) -> None:
        super().__init__(traffic)
        self._compressor, self._loss_scale = compressor, traffic.loss_scale
        # Limit (largest magnitude that may be sent) -> the largest magnitude that was found in each
        # bucket with this limit, as a tensor of one element.
        self._found: dict[float, list[Tensor]] = {}
        # Only in two hops: functions that block (the host, or on NCCL the stream) until this host's
        # sums of a bucket have been encoded.
        self._encoding: list[Callable[[], object]] = []
        self._refusal: RuntimeError | None = None
        self._is_nan: Tensor | None = None
        self._next: compression.Compressor | None = None

    # --- the reduce half --------------------------------------------------------------------------

    @override
    def launch_reduce(self, bucket: Bucket) -> Work:
        """Encodes the bucket's gradients and launches the message. Does not block.

        After the work's `wait`, which also decodes, `bucket.mean` holds the mean.
        """
        return self._send(bucket, partial(self._encode, bucket, self._loss_scale()))

    @abstractmethod
    def _encode(self, bucket: Bucket, scale: Tensor | None) -> Sending:
        """Encodes the bucket's gradients, which backward has multiplied by the loss scale `scale`.

        A `scale` of None means 1. Also looks for inf, see `_look_for_inf`.
        """

    def _send(self, bucket: Bucket | None, encode: Callable[[], Sending]) -> Work:
        """Calls `encode`, and launches the message. Returns its work, whose `wait` also decodes.

        Does not block. None instead of a bucket means that all buckets are encoded.
        """
        sending = self._as_device_work("encode", bucket, encode)
        work = sending.launch()
        if sending.decode is None:
            return work
        return work.then(partial(self._as_device_work, "decode", bucket, sending.decode))

    def _as_device_work(
        self, lane: str, bucket: Bucket | None, work: Callable[..., T], *args: Any
    ) -> T:
        """Calls `work`, which encodes or decodes, and records it; see `as_device_work`."""
        tag = None if bucket is None else self.tag_of(bucket)
        return as_device_work(self.collectives, lane, tag, work, *args)

    # --- gradients that are not finite ------------------------------------------------------------

    def _look_for_inf(self, rows: Tensor, largest: float = math.inf) -> None:
        """Stores the largest magnitude in `rows`, without waiting for a device.

        `take_found_inf` is True later if it is nan, or more than `largest` or the dtype's maximum.
        """
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
            # `_look_for_inf` has made its tensors on the second stream. That stream must wait for
            # the reads above before it reuses their memory (see `Streams.beside`).
            self.collectives.streams.lead_readers()
        return ~torch.cat(are_small).all() if are_small else False

    @override
    def hear_found_inf(self, found: Tensor) -> None:
        """If `found`, makes all means nan, so that a loss scale skips the step and backs off.

        If the step is made all the same (there is no loss scale), it depends on the backend. On
        gloo `check` raises `GradientsNotFinite`. On NCCL, and on one rank with a device, the host
        would have to wait for `found`. There all gathered means or parameters become nan, too. With
        `Traffic.is_staged` the host waits, and `check` raises.
        """
        factor: Any = math.nan
        if self._is_staged or self._hears_on_host:
            if not found:
                return
            self._refusal = GradientsNotFinite(
                "A rank's gradients, or a host's sum of them, have nan or inf in them, which"
                f" compressor={self._compressor.name!r} cannot send, or would keep in residuals."
                f"{self._compressor.overflows} No weight has changed, and no residual. Find the"
                " operation with Trainer(detect_anomaly=True), or the hook that changes gradients."
                " Lower the learning rate, clip gradients, or set precision='16-mixed', which skips"
                " such steps."
            )
        else:
            is_nan = found.bool()
            self._is_nan = is_nan if self._is_nan is None else self._is_nan | is_nan
            factor = torch.where(found.view(()).bool(), math.nan, 1.0)
        torch._foreach_mul_([coded.bucket.mean for coded in self.coded], factor)

    @property
    def _hears_on_host(self) -> bool:
        """Whether flags lie on the host: on gloo, unless this rank is alone on a device."""
        collectives, mean = self.collectives, self.coded[0].bucket.mean
        is_cpu = mean.is_cpu and collectives.streams.current() is None
        return collectives.wait_blocks_host and (collectives.world.size > 1 or is_cpu)

    @override
    def look_again(self) -> None:
        self._look_at_means()

    def _look_at_means(self, says: Tensor | None = None) -> Tensor:
        """Finds out whether a mean of any rank has nan or inf, and whether any `says` is true.

        If the first answer is yes, all means become nan, see `hear_found_inf`. Collective, blocks
        (the host, or on NCCL the stream).

        Args:
            says: This rank's answer to another question, as a bool tensor. None means no.

        Returns:
            [2] uint8: both answers, equal on all ranks.
        """
        for coded in self.coded:
            self._look_for_inf(coded.bucket.mean)
        is_alone, found = self.collectives.world.size == 1, self.take_found_inf()
        device = self.coded[0].bucket.mean.device if is_alone else self.collectives.flags_device
        flags = torch.zeros(2, dtype=torch.uint8, device=device)
        flags[0] = bool(found) if self._hears_on_host else found
        if says is not None:
            flags[1] = bool(says) if self._hears_on_host else says
        self.collectives.launch_max(flags).wait()
        self.hear_found_inf(flags[0])
        return flags

    @override
    def check(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    @override
    def use(self, compressor: compression.Compressor, *, is_idle: bool = True) -> None:
        """Changes the compressor, on all ranks alike; see `Exchange.use`. Local.

        The new compressor must be `Fp32`, or keep the same memories between steps as the first one.
        A bucket that was made with another codec than the first (by `groups`, or `Fp32` by the
        plan) goes back to its own codec, unless the new compressor is `Fp32`.
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
        """Forgets the step's refusal or nan, and takes the compressor that `use` has put off."""
        self._refusal = self._is_nan = None
        self._encoding = []
        if self._next is not None:
            self.use(self._next)


def largest_of(numbers: Tensor) -> Tensor:
    """Returns the largest magnitude, or nan if there is a nan, as a scalar tensor.

    The host does not wait for a device.
    """
    if not torch_modes.saves_calls(numbers.device):
        low, high = numbers.aminmax()
        return torch.maximum(low.abs_(), high.abs_())
    return torch.linalg.vector_norm(numbers, math.inf)  # type: ignore[no-any-return]
