"""Ok-Topk's baselines that give every rank the whole mean in backward, and gather nothing.

gradients / P + residual -> selection -> to all ranks -> sum, on every rank          (TopkA)
gradients / P + residual -> selection -> up a tree, k of the sums -> back down it    (gTopk)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from torch import Tensor
from typing_extensions import override

from lightning_dear.bucket import Bucket
from lightning_dear.collectives.work import Work
from lightning_dear.compression import SparseAllReduce
from lightning_dear.exchange.base import CompressedExchange, LossScale, Sending
from lightning_dear.exchange.dense import DenseExchange
from lightning_dear.exchange.sparse.bucket import SparseBucket, compression_ratio, not_empty
from lightning_dear.exchange.sparse.entries import Entries, added, is_among, unpacked
from lightning_dear.exchange.sparse.selection import check_buckets
from lightning_dear.telemetry.device_work import device_work


class WholeSparseExchange(CompressedExchange):
    """Sums what all ranks have selected, on all of them, or up a tree.

    Args:
        dense: Moves what is not sparse.
        codec: Says what is selected, and which way it goes.
        uncompressed: Numbers of buckets that travel as they are.
        buckets: All of the plan's, all-reduced ones where there are several ranks.
        loss_scale: Asked at each selection.
    """

    def __init__(
        self,
        dense: DenseExchange,
        codec: SparseAllReduce,
        uncompressed: Collection[int],
        buckets: Sequence[Bucket],
        loss_scale: LossScale,
    ) -> None:
        super().__init__(dense, codec, loss_scale)
        check_buckets(codec, uncompressed, self.collectives, buckets)
        self._is_tree = codec.is_tree
        self._failure: BaseException | None = None
        self.coded: Sequence[SparseBucket] = [
            SparseBucket(
                bucket, codec, self.collectives, is_encoded=bucket.number not in uncompressed
            )
            for bucket in buckets
        ]

    @override
    def expect_reduce(self, bucket: Bucket) -> None:
        one = self.coded[bucket.number]
        if not one.is_sparse:
            self._dense.expect_reduce(bucket)
        elif not self._is_tree:
            one.expect("reduce_scatter", self.first_number + bucket.number)

    @override
    def _encode(self, bucket: Bucket, scale: Tensor | None) -> Sending:
        """Selects of the bucket's gradients; what is large goes to all ranks, or up the tree."""
        one, number = self.coded[bucket.number], self.first_number + bucket.number
        if not one.is_sparse:
            self._look_for_inf(one.flushed(scale))
            return Sending(partial(self._dense.launch_reduce, bucket))
        waiting = one.accumulated(scale)
        selected = one.select(waiting)
        self._look_for_inf(not_empty(selected))
        # All of it arrives, whatever others have selected.
        waiting.index_fill_(0, selected.places, 0.0)
        own = selected.times(scale)
        if self._is_tree:
            # Its rounds come after backward, when somebody waits.
            return Sending(lambda: Work(partial(self._through_tree, one, own, scale)))
        messages = dict.fromkeys(range(self.collectives.world_size), own.packed())
        launch = partial(one.launch, "reduce_scatter", messages, one.incoming, number)
        return Sending(launch, one.sum_up)

    # --- gTopk ------------------------------------------------------------------------------------

    def _through_tree(self, one: SparseBucket, own: Entries, scale: Tensor | None) -> None:
        """In the same order of buckets on all ranks; blocks. Once it has failed, fails again."""
        if self._failure is not None:
            raise self._failure
        try:
            self._add_up_the_tree(one, own, scale)
        except BaseException as failure:
            self._failure = failure
            raise

    def _add_up_the_tree(self, one: SparseBucket, own: Entries, scale: Tensor | None) -> None:
        rank, world_size = self.collectives.rank, self.collectives.world_size
        below = rank & -rank if rank else 1 << (world_size - 1).bit_length()
        children = [rank + step for step in _powers(below) if rank + step < world_size]
        for child in children:
            received = self._receive(one, child)
            with device_work():
                total = added(own, received)
                own = total.largest(one.selection.k)
                is_left = ~is_among(total.places.long(), own.places.long(), one.spec.padded_numel)
                left = total.numbers[is_left] if scale is None else total.numbers[is_left] / scale
                one.worker.put_back(total.places[is_left].long(), left)
        if rank:
            self._send(one, own.packed(), [rank - below])
            own = self._receive(one, rank - below)
        message = own.packed()
        self._send(one, message, children[::-1])
        with device_work():
            mean = one.bucket.mean.zero_()
            mean[own.places.long()] = own.numbers.to(mean.dtype)

    def _receive(self, one: SparseBucket, source: int) -> Entries:
        place = one.incoming, self.first_number + one.number
        self.collectives.launch_messages("reduce_scatter", {}, [source], *place).wait()
        one.tally.words_received += 2 * int(one.incoming[source, 0])
        return unpacked(one.incoming[source])

    def _send(self, one: SparseBucket, message: Tensor, ranks: Sequence[int]) -> None:
        place = one.incoming, self.first_number + one.number
        messages = dict.fromkeys(ranks, message)
        one.tally.words_sent += 2 * int(message[0]) * len(ranks)
        self.collectives.launch_messages("reduce_scatter", messages, [], *place).wait()

    @property
    @override
    def compression_ratio(self) -> float:
        return compression_ratio(self.coded, self.collectives.world_size)


def _powers(end: int) -> list[int]:
    """1, 2, 4, ... below `end`."""
    return [1 << place for place in range(end.bit_length() - 1)]
