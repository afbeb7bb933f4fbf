"""The low-rank exchange: two all-reduces of thin factors make the mean gradient (PowerSGD).

    gradients + residual M -> P = M Q -> all-reduce                                     (backward)
    mean P -> orthonormal P -> Q = M^T P -> all-reduce                            (after backward)
    mean = P Q^T, on every rank; residual = M - P Q^T of this rank's own Q

A bucket's P is sent when the bucket is full. After backward the Qs follow, each made while those
before travel. All ranks keep one order: every P in plan order, then every Q in plan order.

Nothing in backward may wait for another rank, not even for a P. Backward can have collectives of
its own (SyncBatchNorm's). A rank that waits in one fills no more buckets until all ranks are there;
if another rank waits for the P of such a bucket, nobody moves again. Nor can a Q go out in backward
without a wait, whenever its P turns out to be there: that is between other Ps on each rank, and
all-reduces are matched by their order. A process group of their own would give the Qs an order on
gloo, for as many connections again; NCCL wants one order over all groups, and its host runs too far
ahead of the device to find a P there. So backward hides the way of the Ps, not that of the Qs.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial

from torch import Tensor
from typing_extensions import override

from lightning_dear.bucket import Bucket, FlatBuffers, storage_shape
from lightning_dear.collectives.work import Work
from lightning_dear.compression import Fp32, PowerSGD
from lightning_dear.exchange.compressed import CompressedExchange, LossScale, Sending
from lightning_dear.exchange.dense import DenseExchange
from lightning_dear.exchange.low_rank_bucket import LowRankBucket, Messages
from lightning_dear.telemetry.device_work import device_work


class LowRankExchange(CompressedExchange):
    """All-reduces the factors of every matrix, and what is no matrix as it is.

    Args:
        dense: Does what remains to be done for the gather half.
        codec: Says what is factored.
        uncompressed: Numbers of buckets of which nothing is factored.
        flat: All buckets, and the shapes of what lies in them.
        loss_scale: Asked at each encoding.
    """

    def __init__(
        self,
        dense: DenseExchange,
        codec: PowerSGD,
        uncompressed: Collection[int],
        flat: FlatBuffers,
        loss_scale: LossScale,
    ) -> None:
        super().__init__(dense, codec, loss_scale)
        shapes = [storage_shape(placement.parameter) for placement in flat.placements]
        self.coded: Sequence[LowRankBucket] = [
            LowRankBucket(
                bucket,
                codec,
                Fp32() if bucket.number in uncompressed else codec,
                shapes,
                self.collectives.world_size,
            )
            for bucket in flat.buckets
        ]
        if self.collectives.rank == 0 and not any(one.factors for one in self.coded):
            warnings.warn(
                "compressor='powersgd' compresses nothing: no weight is a matrix of which"
                f" rank={codec.rank} leaves 1/{codec.min_saving:g} or less (min_saving). Leave it"
                " out, or choose a smaller rank.",
                stacklevel=2,
            )
        # What is to be done for the second messages of buckets whose first are on their way.
        self._unsent: deque[Callable[[], None]] = deque()
        self._seconds: dict[int, Work] = {}

    @override
    def expect_reduce(self, bucket: Bucket) -> None:
        """An all-reduce has receives of its own."""

    @override
    def _encode(self, bucket: Bucket, scale: Tensor | None) -> Sending:
        """Encodes the bucket's first message.

        To be called for all buckets, in plan order, before the first of them is waited for: that
        wait sends the second messages of all.
        """
        low = self.coded[bucket.number]
        # Factors of what is not finite may look finite.
        self._look_for_inf(low.compensated(scale))
        messages = low.encode_first()
        launch = partial(self._launch_first, low, messages, scale)
        return Sending(launch, partial(low.decode, messages))

    def _launch_first(self, low: LowRankBucket, messages: Messages, scale: Tensor | None) -> Work:
        first = self._all_reduce(low.bucket, messages.first)
        # Not in backward, where nothing may wait for another rank: see above.
        self._unsent.append(partial(self._launch_second, first, low, messages, scale))
        return Work(partial(self._arrive, low))

    def _launch_second(
        self, first: Work, low: LowRankBucket, messages: Messages, scale: Tensor | None
    ) -> None:
        first.wait()
        with device_work():
            low.encode_second(messages, scale)
        self._seconds[low.number] = self._all_reduce(low.bucket, messages.second)

    def _arrive(self, low: LowRankBucket) -> None:
        while self._unsent:
            self._unsent[0]()
            # Only now: a wait that has failed must fail again.
            self._unsent.popleft()
        self._seconds[low.number].wait()
        del self._seconds[low.number]

    def _all_reduce(self, bucket: Bucket, message: Tensor) -> Work:
        if not message.numel():
            # No matrix in this bucket, on any rank.
            return Work.done()
        return self.collectives.launch_all_reduce(message, self.first_number + bucket.number)

    @property
    @override
    def compression_ratio(self) -> float:
        dense = sum(low.bucket.mean.nbytes for low in self.coded)
        messages = [low.messages for low in self.coded]
        return dense / sum(one.first.nbytes + one.second.nbytes for one in messages)
