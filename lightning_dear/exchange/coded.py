"""The exchange that encodes: bytes travel, and what encoding loses stays with who encoded it.

    gradients + residual -> encode -> all-to-all -> decode, sum -> mean                    (reduce)
    gradients + residual -> encode -> reduce-scatter -> decode -> mean     (where bytes add up)
    mean + owner's residual -> encode -> all-gather -> decode -> mean                      (gather)
    stepped shard - replica -> encode -> all-gather -> decode, add -> replica  (or this one instead)

Every rank, the owner too, takes its numbers from the bytes, so that all have the same bits. Sums
are made in fp32 and in rank order (by NCCL, where that sums bytes, in its own order). Either half
may travel as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial

from torch import Tensor
from typing_extensions import override

from lightning_dear.bucket import Bucket
from lightning_dear.collectives.work import Work, sum_in_source_order
from lightning_dear.compression import Codec
from lightning_dear.exchange.coded_bucket import CodedBucket, Encoded
from lightning_dear.exchange.compressed import CompressedExchange, LossScale, Sending
from lightning_dear.exchange.dense import DenseExchange
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.exchange.reduction import Reduction
from lightning_dear.telemetry.device_work import device_work
from lightning_dear.torch_modes import plain_mode


class CodedExchange(CompressedExchange):
    """Encodes the halves that the codec names; the other one, if any, travels as it is.

    Encoding happens where a half is launched, decoding where it is waited for, in the bucket's
    gradients, whose content is of no use then: nobody reads a parameter, and so none gets a
    gradient, before what is gathered for it has arrived.

    Args:
        dense: Moves the half that is not encoded.
        options: With a codec.
        codecs: What the tensors of each bucket are configured for: None is that codec.
        uncompressed: Numbers of buckets that travel as they are all the same.
        buckets: All of the plan's.
        loss_scale: Asked at each encoding.
    """

    def __init__(
        self,
        dense: DenseExchange,
        options: ExchangeOptions,
        codecs: Iterable[Codec | None],
        uncompressed: Collection[int],
        buckets: Iterable[Bucket],
        loss_scale: LossScale,
    ) -> None:
        assert isinstance(options.codec, Codec)
        super().__init__(dense, options.codec, loss_scale)
        self._encodes_reduce, self._encodes_gather = map(options.encodes, ("reduce", "gather"))
        self.coded: Sequence[CodedBucket] = [
            CodedBucket(
                bucket,
                options,
                codec or options.codec,
                self.collectives,
                self.first_number,
                is_encoded=bucket.number not in uncompressed,
            )
            for bucket, codec in zip(buckets, codecs, strict=True)
        ]

    # --- the reduce half ----------------------------------------------------------------------

    @override
    def expect_reduce(self, bucket: Bucket) -> None:
        reduction = self.coded[bucket.number].reduction
        if reduction is None:
            self._dense.expect_reduce(bucket)
        else:
            reduction.expect(self.first_number + bucket.number)

    @override
    def _encode(self, bucket: Bucket, scale: Tensor | None) -> Sending:
        """Encodes the bucket's gradients, each rank's part for itself."""
        coded = self.coded[bucket.number]
        reduction = coded.reduction
        if reduction is None:
            self._look_for_inf(coded.clear_padding())
            return Sending(partial(self._dense.launch_reduce, bucket))
        rows = coded.compensated(scale)
        self._look_for_inf(rows, math.inf if scale is None else coded.codec.largest)
        encoded = coded.encode_reduce(rows, scale)
        launch = partial(reduction.launch, self.first_number + bucket.number)
        return Sending(launch, partial(self._sum, coded, reduction, encoded, scale))

    def _sum(
        self, coded: CodedBucket, reduction: Reduction, encoded: Encoded, scale: Tensor | None
    ) -> None:
        rows, mean = coded.rows(reduction.rows), coded.bucket.mean
        coded.decode(reduction.wires, rows, encoded)
        sum_in_source_order(list(rows), mean)
        if encoded.codec.votes:
            # Signs have neither the mean's 1/P nor the loss scale.
            mean.mul_(1 / self.collectives.world_size)
            if scale is not None:
                mean.mul_(scale)

    @override
    def add_earlier(self, bucket: Bucket, earlier: Tensor | None, *, is_empty: bool) -> None:
        """Votes do not add up: those of no gradient are left out, and `check` refuses others."""
        is_vote = self._encodes_reduce and self.coded[bucket.number].codec.votes
        if earlier is None or not is_vote:
            super().add_earlier(bucket, earlier, is_empty=is_empty)
            return
        bucket.mean.copy_(earlier)
        if not is_empty:
            self._refusal = RuntimeError(
                "Gradients came after others of the same step had been sent, and"
                f" compressor={self._codec.name!r} votes, once a step. No weight has changed. Run"
                " every backward but the step's last one in"
                " `with trainer.strategy.block_backward_sync():`, or"
                " `with fabric.no_backward_sync(model):`, or use a compressor that does not vote,"
                " such as 'efsignsgd'."
            )

    @property
    @override
    def voting(self) -> AbstractSet[int]:
        if not self._encodes_reduce:
            return frozenset()
        return {one.number for one in self.coded if one.codec.votes}

    @override
    def refuse_votes(self, names: Sequence[str]) -> None:
        """An absent gradient would be a vote for +1: zeros count as positive."""
        first = ", ".join(f"'{name}'" for name in names[:3])
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        self._refusal = RuntimeError(
            f"Some ranks have a gradient for {first}{more} and others have none, and"
            f" compressor={self._codec.name!r} votes: who has no gradient cannot abstain. No"
            " weight has changed. Let all ranks use the same parameters in a step, or use a"
            " compressor that does not vote, such as 'efsignsgd'."
        )

    # --- the gather half ----------------------------------------------------------------------

    @override
    def expect_gather(self, bucket: Bucket) -> None:
        if self._sends_bytes_back(self.coded[bucket.number]):
            wire, number = self.coded[bucket.number].gathered, self.first_number + bucket.number
            self.collectives.expect_all_gather(wire.view(-1), number)
        else:
            self._dense.expect_gather(bucket)

    @override
    def prepare_gather(self, bucket: Bucket) -> Callable[[], Work]:
        """Encodes this rank's shard, of the mean or the lag; what is returned sends it to all."""
        coded = self.coded[bucket.number]
        if self._sends_bytes_back(coded):
            with device_work():
                encoded = coded.encode_gather()
            return partial(self._send, coded, coded.gathered, encoded, self._is_nan)
        coded.flush()
        return partial(self._send_dense, coded, self._dense.prepare_gather(bucket))

    def _send(
        self, coded: CodedBucket, wire: Tensor, encoded: Encoded, is_nan: Tensor | None
    ) -> Work:
        number = self.first_number + coded.number
        work = self.collectives.launch_all_gather(wire.view(-1), number)
        return self._decoded(work, partial(self._write, coded, wire, encoded, is_nan))

    def _write(
        self, coded: CodedBucket, wire: Tensor, encoded: Encoded, is_nan: Tensor | None
    ) -> None:
        # In whatever context somebody reads a parameter.
        with plain_mode(coded.bucket.parameters.device.type):
            rows = coded.rows(slice(None))
            coded.decode(wire, rows, encoded)
            if is_nan is not None:
                # Many codecs cannot send it.
                rows.masked_fill_(is_nan, math.nan)
            coded.write(rows, encoded)

    def _send_dense(self, coded: CodedBucket, launch: Callable[[], Work]) -> Work:
        # Never done at once, not even with one rank: whoever waits steps the bucket.
        return Work(launch().wait, coded.bucket.note_published)

    @override
    def sync(self, bucket: Bucket) -> Work:
        # Not encoded: nothing stays behind.
        if not bucket.lags:
            return Work.done()
        return self._send_dense(self.coded[bucket.number], self._dense.prepare_gather(bucket))

    def _sends_bytes_back(self, coded: CodedBucket) -> bool:
        return self._encodes_gather and not coded.codec.is_identity

    @property
    @override
    def compression_ratio(self) -> float:
        dense = sent = 0
        for coded in self.coded:
            nbytes = coded.bucket.parameters.nbytes
            dense += 2 * nbytes
            for is_encoded in (self._encodes_reduce, self._sends_bytes_back(coded)):
                sent += coded.outgoing.nbytes if is_encoded else nbytes
        return dense / sent
