"""The exchange that encodes: bytes travel, and what encoding loses stays with who encoded it.

    gradients + residual -> encode -> all-to-all -> decode, sum -> mean                    (reduce)
    mean + owner's residual -> encode -> all-gather -> decode -> mean                      (gather)
    stepped shard - replica -> encode -> all-gather -> decode, add -> replica  (or this one instead)

Every rank, the owner too, takes its numbers from the bytes, so that all have the same bits. Sums
are made in fp32 and in rank order. Either half may travel as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from torch import Tensor
from typing_extensions import override

from lightning_dear.bucket import Bucket
from lightning_dear.compression.codec import Codec
from lightning_dear.compression.floats import Fp32
from lightning_dear.exchange.coded_bucket import CodedBucket, Encoded, zero_or_nan
from lightning_dear.exchange.dense import DenseExchange
from lightning_dear.exchange_options import ExchangeOptions
from lightning_dear.plain_mode import plain_mode
from lightning_dear.summing import sum_in_source_order
from lightning_dear.work import Collectives, Work

LossScale = Callable[[], "Tensor | None"]
"""What gradients are multiplied by at present, as a tensor of one element; None: by nothing."""


class GradientsNotFinite(RuntimeError):
    """A rank's gradients have nan or inf in them; all ranks raise it before weights change."""


class CodedExchange(DenseExchange):
    """Encodes the halves that the codec names; the other one, if any, travels as it is.

    Encoding happens where a half is launched, decoding where it is waited for, in the bucket's
    gradients, whose content is of no use then: nobody reads a parameter, and so none gets a
    gradient, before what is gathered for it has arrived.

    Args:
        dense: Moves the half that is not encoded.
        options: With a codec.
        collectives: What moves the bytes.
        first_number: See `DenseExchange`.
        buckets: All of the plan's.
        loss_scale: Asked at each encoding.
    """

    def __init__(
        self,
        dense: DenseExchange,
        options: ExchangeOptions,
        collectives: Collectives,
        first_number: int,
        buckets: Iterable[Bucket],
        loss_scale: LossScale,
    ) -> None:
        super().__init__(collectives, first_number)
        assert options.codec is not None
        self._dense = dense
        self._codec = options.codec
        self._loss_scale = loss_scale
        self._encodes_reduce, self._encodes_gather = map(options.encodes, ("reduce", "gather"))
        self.coded = [
            CodedBucket(bucket, options, collectives.rank, collectives.world_size)
            for bucket in buckets
        ]
        self._found_inf: Tensor | None = None
        self._is_broken = False
        self._is_nan: Tensor | None = None

    # --- the reduce half ----------------------------------------------------------------------

    @override
    def expect_reduce(self, bucket: Bucket) -> None:
        if self._encodes_reduce:
            number = self._first_number + bucket.number
            self._collectives.expect_all_to_all(self.coded[bucket.number].incoming, number)
        else:
            self._dense.expect_reduce(bucket)

    @override
    def launch_reduce(self, bucket: Bucket) -> Work:
        """Encodes the bucket's gradients and starts sending each rank its part."""
        coded = self.coded[bucket.number]
        if not self._encodes_reduce:
            self._look_for_inf(coded.clear_padding())
            return self._dense.launch_reduce(bucket)
        scale = self._loss_scale()
        rows = coded.compensated(scale)
        self._look_for_inf(rows)
        encoded = coded.encode_reduce(rows, scale)
        number = self._first_number + bucket.number
        work = self._collectives.launch_all_to_all(coded.outgoing, coded.incoming, number)
        return Work(work.wait, partial(self._sum, coded, coded.incoming, encoded, scale))

    def _sum(
        self, coded: CodedBucket, incoming: Tensor, encoded: Encoded, scale: Tensor | None
    ) -> None:
        rows, mean = coded.rows(), coded.bucket.mean
        coded.decode(incoming, rows, encoded)
        sum_in_source_order(list(rows), mean)
        if encoded.codec.kind == "vote":
            # Signs have neither the mean's 1/P nor the loss scale.
            mean.mul_(1 / len(rows))
            if scale is not None:
                mean.mul_(scale)

    # --- gradients that are not finite --------------------------------------------------------

    def _look_for_inf(self, rows: Tensor) -> None:
        is_inf = zero_or_nan(rows) != 0
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
        if self._collectives.reads_flags_freely:
            if not found:
                return
            self._is_broken = True
        else:
            is_nan = found.bool()
            self._is_nan = is_nan if self._is_nan is None else self._is_nan | is_nan
        for coded in self.coded:
            coded.bucket.mean.masked_fill_(found.bool(), math.nan)

    @override
    def check(self) -> None:
        if self._is_broken:
            raise GradientsNotFinite(
                "A rank's gradients have nan or inf in them, which compressor="
                f"{self._codec.name!r} cannot send. No weight has changed, and no residual. Find"
                " the operation with Trainer(detect_anomaly=True), lower the learning rate or clip"
                " gradients, or use precision='16-mixed', which leaves such steps out."
            )

    # --- the gather half ----------------------------------------------------------------------

    @override
    def expect_gather(self, bucket: Bucket) -> None:
        if self._sends_bytes_back:
            wire, number = self.coded[bucket.number].gathered, self._first_number + bucket.number
            self._collectives.expect_all_gather(wire.view(-1), number)
        else:
            self._dense.expect_gather(bucket)

    @override
    def prepare_gather(self, bucket: Bucket) -> Callable[[], Work]:
        """Encodes this rank's shard, of the mean or the lag; what is returned sends it to all."""
        coded = self.coded[bucket.number]
        if self._sends_bytes_back:
            encoded = coded.encode_gather()
            return partial(self._send, coded, coded.gathered, encoded, self._is_nan)
        coded.flush()
        return partial(self._send_dense, coded, self._dense.prepare_gather(bucket))

    def _send(
        self, coded: CodedBucket, wire: Tensor, encoded: Encoded, is_nan: Tensor | None
    ) -> Work:
        number = self._first_number + coded.number
        work = self._collectives.launch_all_gather(wire.view(-1), number)
        return Work(work.wait, partial(self._decode, coded, wire, encoded, is_nan))

    def _decode(
        self, coded: CodedBucket, wire: Tensor, encoded: Encoded, is_nan: Tensor | None
    ) -> None:
        # In whatever context somebody reads a parameter.
        with plain_mode(coded.bucket.parameters.device.type):
            rows = coded.rows()
            coded.decode(wire, rows, encoded)
            if is_nan is not None:
                # Many codecs cannot send it.
                rows.masked_fill_(is_nan, math.nan)
            coded.write(rows)

    def _send_dense(self, coded: CodedBucket, launch: Callable[[], Work]) -> Work:
        # Never done at once, not even with one rank: whoever waits steps the bucket.
        return Work(launch().wait, coded.bucket.note_published)

    def sync(self, bucket: Bucket) -> Work:
        """Starts gathering the stepped shards of `bucket`, not encoded. All ranks call."""
        return self._send_dense(self.coded[bucket.number], self._dense.prepare_gather(bucket))

    @property
    def _sends_bytes_back(self) -> bool:
        return self._encodes_gather and not isinstance(self._codec, Fp32)

    @property
    @override
    def compression_ratio(self) -> float:
        dense = [coded.bucket.parameters.nbytes for coded in self.coded]
        encoded = [coded.outgoing.nbytes for coded in self.coded]
        halves = self._encodes_reduce, self._sends_bytes_back
        return 2 * sum(dense) / sum(sum(encoded if half else dense) for half in halves)

    @override
    def use(self, codec: Codec) -> None:
        """Encodes with another codec, from the next reduction on. All ranks, between two steps.

        It must need of what is kept between steps what the first codec has, or `Fp32`.
        """
        if codec != self._codec:
            self._codec = codec
            for coded in self.coded:
                coded.use(codec)

    # --- around a step --------------------------------------------------------------------------

    @override
    def note_used(self, used: Sequence[bool], *, keeps: bool) -> None:
        scale = None if all(used) else self._loss_scale()
        for coded in self.coded:
            coded.note_used(used, scale, keeps=keeps)

    @override
    def commit(self) -> None:
        self._is_broken, self._is_nan = False, None
        for coded in self.coded:
            coded.worker.commit()

    @override
    def discard(self) -> None:
        self._is_broken, self._is_nan = False, None
        for coded in self.coded:
            coded.worker.discard()
