"""The exchange that encodes buckets row by row. The rank that encodes keeps what encoding loses.

With a codec whose error feedback is off, what encoding loses is dropped.

Reduce half, one of:

    gradients + residual -> encode -> all-to-all -> decode, sum -> mean
    gradients + residual -> encode -> reduce-scatter -> decode -> mean   (if encoded bytes add up)
    gradients -> sum on the host + residual -> encode -> to other hosts -> decode, sum -> mean
                                                    (two hops, with several ranks on each host)
Gather half, one of:

    mean + owner's residual -> encode -> all-gather -> decode -> mean
    stepped shard - replica -> encode -> all-gather -> decode, add -> replica

In the gather half every rank, the owner too, decodes the bytes that were sent, so that all ranks
have the same bits. Sums are made in fp32 and in rank order; if NCCL sums (encoded bytes that add
up, or a host's gradients), in NCCL's order. The gather half may also travel uncompressed.
"""

from collections.abc import Iterable, Sequence, Set
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
    """Encodes the halves that the codec names: both, or the reduce half only.

    A half is encoded when it is launched (in two hops, when the host's sums have arrived), and
    decoded when it is waited for. Gradients in fp32 lend their memory to the decoded values. In the
    reduce half they are encoded by then. In the gather half there are none yet: no parameter is
    read before that half has arrived.

    Args:
        traffic: The buckets, in which each rank owns a shard, and their collectives.
        options: Options whose compressor is a codec.
        codecs: For each bucket the codec of its tensors. None means the codec of `options`.
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
    def expect_reduce(self, bucket: Bucket) -> None:
        coded = self.coded[bucket.number]
        coded.reduction.expect(coded.tag)

    @override
    def _encode(self, bucket: Bucket, scale: Tensor | None) -> Sending:
        """Encodes the bucket's gradients in one hop: row r is the shard of rank r."""
        coded = self.coded[bucket.number]
        flat = coded.own_gradients(bucket.gradients.float())
        return self._encode_rows(coded, scale, flat.view(self.collectives.world.size, -1))

    def _encode_rows(self, coded: CodedBucket, scale: Tensor | None, rows: Tensor) -> Sending:
        """Adds the residual to `rows`, looks for inf, and encodes. `rows` is mutated."""
        coded.compensate(rows, scale)
        self._look_for_inf(rows, coded.most if scale is None else coded.compressor.largest)
        return coded.encode_reduce(rows, scale)

    @override
    def launch_reduce(self, bucket: Bucket) -> Work:
        """Encodes and sends the gradients. Does not block.

        In two hops it sends the gradients within the host, uncompressed. The host's sums are
        encoded when they have arrived, and then sent to the other hosts. If any codec of the
        options votes, there is one hop.
        """
        coded, scale = self.coded[bucket.number], self._loss_scale()
        reduction = coded.reduction
        if not isinstance(reduction, HostsReduction):
            return super().launch_reduce(bucket)
        made: list[Sending] = []
        coded.own_gradients(bucket.gradients)

        def encode(sums: Tensor) -> Tensor:
            sending = self._as_device_work("encode", bucket, self._encode_rows, coded, scale, sums)
            made.append(sending)
            return coded.outgoing[: len(sums)]

        def decode() -> None:
            if made[0].decode is not None:
                self._as_device_work("decode", bucket, made[0].decode)

        work, end = reduction.launch_sums(coded.tag, encode)
        self._encoding.append(end)
        return work.then(decode)

    @override
    def add_earlier(self, bucket: Bucket, earlier: Tensor | None, *, is_empty: bool) -> None:
        """Adds the means of both rounds, unless the bucket's codec votes.

        Votes of two rounds do not add up. If the round that has ended had no gradient, the earlier
        votes count. Otherwise `check` refuses the step.
        """
        if earlier is None or not self.coded[bucket.number].compressor.votes:
            super().add_earlier(bucket, earlier, is_empty=is_empty)
            return
        bucket.mean.copy_(earlier)
        if not is_empty:
            self._refusal = RuntimeError(
                "Gradients came after others of the same step had been sent, and"
                f" compressor={self._compressor.name!r} votes only once a step. Run every backward"
                " but the step's last one in `with trainer.strategy.block_backward_sync():`, or"
                " `with fabric.no_backward_sync(model):`, or use a compressor that does not vote,"
                " such as 'efsignsgd'. Votes of two backwards do not add up. No weight has changed."
            )

    @property
    @override
    def voting(self) -> Set[int]:
        return {one.number for one in self.coded if one.compressor.votes}

    @override
    def refuse_votes(self, names: Sequence[str]) -> None:
        """Makes `check` refuse the step.

        A rank without a gradient would vote for +1, because the sign of 0 is positive.
        """
        first = ", ".join(f"'{name}'" for name in names[:3])
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        self._refusal = RuntimeError(
            f"Some ranks have a gradient for {first}{more} and others have none, which"
            f" compressor={self._compressor.name!r} cannot use. Let all ranks use the same"
            " parameters in a step, or use a compressor that does not vote, such as 'efsignsgd'. A"
            " rank without a gradient cannot abstain from the vote. No weight has changed."
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
    def launch_gather(self, bucket: Bucket) -> Work:
        """Encodes this rank's shard of the mean, or the lag of its parameters, and sends it.

        If the bucket's gather half is not encoded, starts an uncompressed gather instead, after
        `CodedBucket.flush`. Its `wait` also calls `Bucket.note_published`.
        """
        coded = self.coded[bucket.number]
        if coded.is_sent_back:
            encode = partial(coded.encode_gather, self._is_nan, self._look_for_inf)
            return self._send(bucket, encode)
        coded.flush()
        return super().launch_gather(bucket).then(bucket.note_published)

    @property
    @override
    def compression_ratio(self) -> float:
        dense = sent = 0
        for coded in self.coded:
            nbytes = coded.bucket.parameters.nbytes
            dense += 2 * nbytes
            sent += coded.nbytes + (coded.nbytes if coded.is_sent_back else nbytes)
        return dense / sent
