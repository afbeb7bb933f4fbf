"""The low-rank exchange: two all-reduces of thin factors make the mean gradient (PowerSGD).

    gradients + residual M -> P = M Q -> all-reduce -> orthonormal P -> Q = M^T P -> all-reduce
    mean = P Q^T, on every rank; residual = M - P Q^T of this rank's own Q

All in backward, in one order on all ranks: P of bucket k, then Q of bucket k - 1, whose P has had
the time between to arrive. The last bucket's Q is sent where buckets are waited for.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial

from torch import Tensor
from typing_extensions import override

from lightning_dear.bucket import Bucket, FlatBuffers, storage_shape
from lightning_dear.compression import Fp32, PowerSGD
from lightning_dear.device_work import device_work
from lightning_dear.exchange.compressed import CompressedExchange, LossScale
from lightning_dear.exchange.dense import DenseExchange
from lightning_dear.exchange.low_rank_bucket import LowRankBucket, Messages
from lightning_dear.work import Collectives, Work


class LowRankExchange(CompressedExchange):
    """All-reduces the factors of every matrix, and what is no matrix as it is.

    Args:
        dense: Does what remains to be done for the gather half.
        codec: Says what is factored.
        uncompressed: Numbers of buckets of which nothing is factored.
        collectives: What moves the bytes.
        first_number: See `DenseExchange`.
        flat: All buckets, and the shapes of what lies in them.
        loss_scale: Asked at each encoding.
        waiting: Entered around waits in backward, with a reason.
    """

    def __init__(
        self,
        dense: DenseExchange,
        codec: PowerSGD,
        uncompressed: Collection[int],
        collectives: Collectives,
        first_number: int,
        flat: FlatBuffers,
        loss_scale: LossScale,
        waiting: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        super().__init__(collectives, first_number, codec, loss_scale)
        self._dense = dense
        self._waiting = waiting
        shapes = [storage_shape(placement.parameter) for placement in flat.placements]
        self.coded: Sequence[LowRankBucket] = [
            LowRankBucket(
                bucket,
                codec,
                Fp32() if bucket.number in uncompressed else codec,
                shapes,
                collectives.world_size,
            )
            for bucket in flat.buckets
        ]
        if collectives.rank == 0 and not any(one.factors for one in self.coded):
            warnings.warn(
                "compressor='powersgd' compresses nothing: no weight is a matrix of which"
                f" rank={codec.rank} leaves 1/{codec.min_saving:g} or less (min_saving). Leave it"
                " out, or choose a smaller rank.",
                stacklevel=2,
            )
        # Of the bucket whose second message is still to be sent.
        self._first = Work.done()
        self._send_second: Callable[[], None] | None = None
        self._seconds: dict[int, Work] = {}

    @override
    def expect_reduce(self, bucket: Bucket) -> None:
        """An all-reduce has receives of its own."""

    @override
    def launch_reduce(self, bucket: Bucket) -> Work:
        """Starts summing the bucket's first message, and then sends the one before its second.

        Blocks until the first message of the bucket before has been summed.
        """
        low, scale = self.coded[bucket.number], self._loss_scale()
        with device_work():
            self._look_for_inf(low.compensated(scale))
            messages = low.encode_first()
        first = self._all_reduce(bucket, messages.first)
        with self._waiting("factors"):
            self._first.wait()
        self._send_waiting()
        self._first = first
        self._send_second = partial(self._launch_second, low, messages, scale)
        return Work(partial(self._arrive, low), partial(low.decode, messages))

    def _launch_second(self, low: LowRankBucket, messages: Messages, scale: Tensor | None) -> None:
        self._first.wait()
        with device_work():
            low.encode_second(messages, scale)
        self._seconds[low.number] = self._all_reduce(low.bucket, messages.second)

    def _send_waiting(self) -> None:
        waiting, self._send_second = self._send_second, None
        if waiting is not None:
            waiting()

    def _arrive(self, low: LowRankBucket) -> None:
        # Nobody has come after the last bucket.
        self._send_waiting()
        self._seconds.pop(low.number).wait()

    def _all_reduce(self, bucket: Bucket, message: Tensor) -> Work:
        if not message.numel():
            return Work.done()
        return self._collectives.launch_all_reduce(message, self._first_number + bucket.number)

    @override
    def expect_gather(self, bucket: Bucket) -> None:
        """Nothing is gathered."""

    @override
    def prepare_gather(self, bucket: Bucket) -> Callable[[], Work]:
        return self._dense.prepare_gather(bucket)

    @property
    @override
    def compression_ratio(self) -> float:
        dense = sum(low.bucket.mean.nbytes for low in self.coded)
        messages = [low.messages for low in self.coded]
        return dense / sum(one.first.nbytes + one.second.nbytes for one in messages)
