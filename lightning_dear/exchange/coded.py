"""The exchange that encodes: bytes travel, and what encoding loses stays with who encoded it.

    gradients + residual -> encode -> all-to-all -> decode, sum -> mean                    (reduce)
    gradients + residual -> encode -> reduce-scatter -> decode -> mean     (where bytes add up)
    gradients -> sum of a host + residual -> encode -> to other hosts -> decode, sum -> mean
                                                           (on hosts of several ranks, in two hops)
    mean + owner's residual -> encode -> all-gather -> decode -> mean                      (gather)
    stepped shard - replica -> encode -> all-gather -> decode, add -> replica  (or this one instead)

Every rank, the owner too, takes its numbers from the bytes, so that all have the same bits. Sums
are made in fp32 and in rank order (by NCCL, where that sums bytes, in its own order). What is
gathered may travel as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial

from torch import Tensor
from typing_extensions import override

from lightning_dear.bucket import Bucket
from lightning_dear.collectives.work import Work
from lightning_dear.compression import Codec
from lightning_dear.exchange.base import CompressedExchange, Sending, Traffic
from lightning_dear.exchange.coded_bucket import CodedBucket, HostsReduction
from lightning_dear.exchange.options import ExchangeOptions


class CodedExchange(CompressedExchange):
    """Encodes the halves that the codec names; the second one may travel as it is.

    Encoding happens where a half is launched, decoding where it is waited for, in the bucket's
    gradients, whose content is of no use then: nobody reads a parameter, and so none gets a
    gradient, before what is gathered for it has arrived.

    Args:
        traffic: Of buckets of which each rank owns a shard.
        options: With a codec.
        codecs: What the tensors of each bucket are configured for: None is that codec.
    """

    def __init__(
        self, traffic: Traffic, options: ExchangeOptions, codecs: Iterable[Codec | None]
    ) -> None:
        assert isinstance(options.compressor, Codec)
        super().__init__(traffic, options.compressor)
        self.coded: Sequence[CodedBucket] = [
            CodedBucket(bucket, options, compressor or options.compressor, traffic)
            for bucket, compressor in zip(traffic.flat.buckets, codecs, strict=True)
        ]

    # --- the reduce half ----------------------------------------------------------------------

    @override
    def reduce_calls(self, bucket: Bucket) -> Sequence[str]:
        return [self.coded[bucket.number].reduction.call]

    @override
    def expect_reduce(self, bucket: Bucket) -> None:
        coded = self.coded[bucket.number]
        coded.reduction.expect(coded.tag)

    @override
    def _encode(self, bucket: Bucket, scale: Tensor | None) -> Sending:
        """Encodes the bucket's gradients, each rank's part for itself."""
        coded = self.coded[bucket.number]
        flat = coded.own_gradients(bucket.gradients.float())
        return self._encode_rows(coded, scale, flat.view(self.collectives.world.size, -1))

    def _encode_rows(self, coded: CodedBucket, scale: Tensor | None, rows: Tensor) -> Sending:
        coded.compensate(rows, scale)
        self._look_for_inf(rows, coded.most if scale is None else coded.compressor.largest)
        return coded.encode_reduce(rows, scale)

    @override
    def launch_reduce(self, bucket: Bucket) -> Work:
        """As ever; or sums within the host, and encodes behind that. Does not block."""
        coded, scale = self.coded[bucket.number], self._loss_scale()
        reduction = coded.reduction
        if not isinstance(reduction, HostsReduction):
            return super().launch_reduce(bucket)
        made: list[Sending] = []
        coded.own_gradients(bucket.gradients)

        def encode(sums: Tensor) -> None:
            made.append(
                self._as_device_work("encode", bucket, self._encode_rows, coded, scale, sums)
            )

        def decode() -> None:
            if made[0].decode is not None:
                self._as_device_work("decode", bucket, made[0].decode)

        work, end = reduction.launch_sums(coded.tag, encode)
        self._encoding.append(end)
        return work.then(decode)

    @override
    def add_earlier(self, bucket: Bucket, earlier: Tensor | None, *, is_empty: bool) -> None:
        """Votes do not add up: those of no gradient are left out, and `check` refuses others."""
        if earlier is None or not self.coded[bucket.number].compressor.votes:
            super().add_earlier(bucket, earlier, is_empty=is_empty)
            return
        bucket.mean.copy_(earlier)
        if not is_empty:
            self._refusal = RuntimeError(
                "Gradients came after others of the same step had been sent, and"
                f" compressor={self._compressor.name!r} votes, once a step. No weight has changed."
                " Run every backward but the step's last one in"
                " `with trainer.strategy.block_backward_sync():`, or"
                " `with fabric.no_backward_sync(model):`, or use a compressor that does not vote,"
                " such as 'efsignsgd'."
            )

    @property
    @override
    def voting(self) -> AbstractSet[int]:
        return {one.number for one in self.coded if one.compressor.votes}

    @override
    def refuse_votes(self, names: Sequence[str]) -> None:
        """An absent gradient would be a vote for +1: zeros count as positive."""
        first = ", ".join(f"'{name}'" for name in names[:3])
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        self._refusal = RuntimeError(
            f"Some ranks have a gradient for {first}{more} and others have none, and"
            f" compressor={self._compressor.name!r} votes: who has no gradient cannot abstain. No"
            " weight has changed. Let all ranks use the same parameters in a step, or use a"
            " compressor that does not vote, such as 'efsignsgd'."
        )

    # --- the gather half ----------------------------------------------------------------------

    @override
    def expect_gather(self, bucket: Bucket) -> None:
        coded = self.coded[bucket.number]
        if coded.is_sent_back:
            self.collectives.expect_all_gather(coded.outgoing.view(-1), coded.tag)
        else:
            super().expect_gather(bucket)

    @override
    def prepare_gather(self, bucket: Bucket) -> Callable[[], Work]:
        """Encodes this rank's shard, of the mean or the lag; what is returned sends it to all."""
        coded = self.coded[bucket.number]
        if coded.is_sent_back:
            encode = partial(coded.encode_gather, self._is_nan, self._look_for_inf)
            return self._encode_now(bucket, encode)
        coded.flush()
        return partial(self._send_as_it_is, coded, super().prepare_gather(bucket))

    def _send_as_it_is(self, coded: CodedBucket, launch: Callable[[], Work]) -> Work:
        return launch().then(coded.bucket.note_published)

    @property
    @override
    def compression_ratio(self) -> float:
        dense = sent = 0
        for coded in self.coded:
            nbytes = coded.bucket.parameters.nbytes
            dense += 2 * nbytes
            sent += coded.nbytes + (coded.nbytes if coded.is_sent_back else nbytes)
        return dense / sent
