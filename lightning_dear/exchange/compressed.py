"""What all exchanges that encode have in common: what must be known before a step may count."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.bucket import Bucket
from lightning_dear.collectives.work import Work
from lightning_dear.compression import Compressor
from lightning_dear.exchange.base import Exchange
from lightning_dear.exchange.compressed_bucket import CompressedBucket, zero_or_nan
from lightning_dear.exchange.dense import DenseExchange
from lightning_dear.telemetry.device_work import device_work

LossScale = Callable[[], "Tensor | None"]
"""What gradients are multiplied by at present, as a tensor of one element; None: by nothing."""


class GradientsNotFinite(RuntimeError):
    """A rank's gradients have nan or inf in them; all ranks raise it before weights change."""


@dataclass(frozen=True)
class Sending:
    """What is to be done once a bucket is encoded.

    Attributes:
        launch: Starts sending it. Does not block.
        decode: What an accelerator does of what has arrived; None: nothing.
    """

    launch: Callable[[], Work]
    decode: Callable[[], None] | None = None


class CompressedExchange(Exchange):
    """Looks at gradients before they are encoded, and keeps residuals only if a step was made.

    Args:
        dense: Moves what is not encoded, by the same collectives.
        codec: What encodes.
        loss_scale: Asked at each encoding.
    """

    coded: Sequence[CompressedBucket]

    def __init__(self, dense: DenseExchange, codec: Compressor, loss_scale: LossScale) -> None:
        super().__init__(dense.collectives, dense.first_number)
        self._dense, self._codec = dense, codec
        self._loss_scale = loss_scale
        self._found_inf: Tensor | None = None
        self._refusal: RuntimeError | None = None
        self._is_nan: Tensor | None = None
        self._next: Compressor | None = None

    # --- the reduce half --------------------------------------------------------------------------

    @override
    def launch_reduce(self, bucket: Bucket) -> Work:
        """Encodes the bucket's gradients and starts sending that. Does not block."""
        with device_work():
            sending = self._encode(bucket, self._loss_scale())
        work = sending.launch()
        return work if sending.decode is None else self._decoded(work, sending.decode)

    @abstractmethod
    def _encode(self, bucket: Bucket, scale: Tensor | None) -> Sending:
        """Encodes the bucket's gradients, which come multiplied by `scale`."""

    def _decoded(self, work: Work, decode: Callable[[], None]) -> Work:
        """`work`, after which whoever waits for it decodes."""

        def finish() -> None:
            with device_work():
                decode()

        return Work(work.wait, finish)

    # --- what is not encoded ----------------------------------------------------------------------

    @override
    def expect_gather(self, bucket: Bucket) -> None:
        self._dense.expect_gather(bucket)

    @override
    def prepare_gather(self, bucket: Bucket) -> Callable[[], Work]:
        return self._dense.prepare_gather(bucket)

    @override
    def launch_gather_gradients(self, bucket: Bucket) -> Work:
        return self._dense.launch_gather_gradients(bucket)

    # --- gradients that are not finite ------------------------------------------------------------

    def _look_for_inf(self, rows: Tensor, largest: float = math.inf) -> None:
        is_inf = zero_or_nan(rows) != 0
        if largest < math.inf:
            is_inf |= torch.linalg.vector_norm(rows, math.inf) > largest
        self._found_inf = is_inf if self._found_inf is None else self._found_inf | is_inf

    @override
    def take_found_inf(self) -> Tensor | bool:
        found, self._found_inf = self._found_inf, None
        return False if found is None else found

    @override
    def hear_found_inf(self, found: Tensor) -> None:
        """Makes all means nan, so that a loss scale backs off; `check` refuses the step without.

        Where the host would have to wait for that, what is decoded becomes nan instead.
        """
        if self.collectives.reads_flags_freely:
            if not found:
                return
            self._refusal = self._not_finite()
        else:
            is_nan = found.bool()
            self._is_nan = is_nan if self._is_nan is None else self._is_nan | is_nan
        for coded in self.coded:
            coded.bucket.mean.masked_fill_(found.bool(), math.nan)

    def _not_finite(self) -> GradientsNotFinite:
        return GradientsNotFinite(
            "A rank's gradients have nan or inf in them, which"
            f" compressor={self._codec.name!r} cannot send, or would keep. No weight has changed,"
            " and no residual. Find the operation with Trainer(detect_anomaly=True), or the hook"
            " that changes gradients; lower the learning rate or clip gradients, or use"
            " precision='16-mixed', which leaves such steps out."
        )

    @override
    def look_again(self) -> None:
        for coded in self.coded:
            self._look_for_inf(coded.bucket.mean)
        flag = torch.zeros(1, dtype=torch.uint8, device=self.coded[0].bucket.mean.device)
        flag[0] = self.take_found_inf()
        self.collectives.launch_any(flag).wait()
        self.hear_found_inf(flag)

    @override
    def check(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    @override
    def use(self, codec: Compressor, *, is_idle: bool = True) -> None:
        """Encodes with another codec, from the next reduction on. All ranks, all alike.

        It must need of what is kept between steps what the first codec has, or be `Fp32`. Buckets
        with another codec than the first keep theirs, but for `Fp32`.
        """
        if not is_idle:
            self._next = codec
            return
        self._next = None
        for coded in self.coded:
            follows = coded.configured == self._codec or codec.is_identity
            coded.use(codec if follows else coded.configured)

    def _use_next(self) -> None:
        if self._next is not None:
            self.use(self._next)

    # --- around a step --------------------------------------------------------------------------

    @override
    def note_used(self, used: Sequence[bool], *, keeps: bool) -> None:
        scale = None if all(used) else self._loss_scale()
        for coded in self.coded:
            coded.note_used(used, scale, keeps=keeps)

    @override
    def commit(self) -> None:
        self._refusal = self._is_nan = None
        for coded in self.coded:
            coded.commit()
        self._use_next()

    @override
    def discard(self) -> None:
        self._refusal = self._is_nan = None
        for coded in self.coded:
            coded.discard()
        self._use_next()
