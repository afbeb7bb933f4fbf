"""The sparse exchanges: each rank sends about k entries, and gets about k sums back (Ok-Topk).

    gradients / P + residual -> local threshold -> entries to owners of regions -> sums   (backward)
    sums -> each owner keeps its share of k, the largest ones -> u                 (before the step)
    u -> to all ranks -> mean gradient; what has arrived leaves the residual    (the next forward)

Each half waits for other ranks only for the values that it sums or writes: regions, thresholds and
owners' shares of k follow from messages of the step before. Between the halves ranks wait for each
other in some steps, for histograms. On gloo a message is only as long as its entries, and begins
with their number.

TopkDSA also sums in regions. It gathers all sums, and ranks exchange counts between the halves of
every step. Other baselines give every rank the whole mean in the reduce half, and gather nothing:

    gradients / P + residual -> selection -> to all ranks -> sum, on every rank (TopkA, Gaussian-k)
    gradients / P + residual -> selection -> up a tree, k of the sums -> back down it    (gTopk)

A bucket travels dense, which means all of its elements, in a step without compression, or if it is
so short that sparse messages would save nothing. It is then reduce-scattered to equal shards and
all-gathered, or with the baselines that gather nothing all-reduced.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.bucket import Bucket
from lightning_dear.collectives.work import GRADIENT_TAGS, SELECTION_TAGS, Work, as_metadata
from lightning_dear.compression import SparseAllReduce
from lightning_dear.compression.sparse_all_reduce import FEWEST_PER_RANK
from lightning_dear.exchange.base import CompressedExchange, Exchange, Sending, Traffic
from lightning_dear.exchange.sparse.bucket import LaunchWithTag, SparseBucket
from lightning_dear.exchange.sparse.entries import Entries, added, unpacked
from lightning_dear.exchange.sparse.owned_bucket import OwnedBucket, RegionBucket, StaticBucket
from lightning_dear.exchange.sparse.regions import are_filled, largest_of_all
from lightning_dear.telemetry.device_work import as_device_work


def check_buckets(compressor: SparseAllReduce, traffic: Traffic) -> None:
    """Refuses buckets that are too long for 32-bit places.

    Rank 0 warns if no bucket travels sparsely, although there are several ranks. Buckets that the
    plan leaves uncompressed are not checked.

    Raises:
        ValueError: If a bucket has more elements than an int32 can number.
    """
    collectives, uncompressed = traffic.collectives, traffic.uncompressed
    meant = [bucket for bucket in traffic.flat.buckets if bucket.number not in uncompressed]
    longest = max((bucket.spec.padded_numel for bucket in meant), default=0)
    if longest > torch.iinfo(torch.int32).max:
        raise ValueError(
            f"compressor={compressor.name!r} numbers elements with 32 bits, and a bucket has"
            f" {longest:,}. Fuse less: set fusion='threshold' with a smaller bucket_cap_mb."
        )
    # A single rank sends nothing, whatever the compressor is.
    num_ranks = collectives.world.size
    is_sparse = any(compressor.saves(bucket.spec.numel, num_ranks) for bucket in meant)
    if meant and num_ranks > 1 and not is_sparse and collectives.world.rank == 0:
        warnings.warn(
            f"compressor={compressor.name!r} compresses nothing. Raise density or bucket_cap_mb, or"
            f" leave it out. Only a bucket with at least {FEWEST_PER_RANK} entries to send for each"
            f" of {num_ranks} ranks, and fewer entries than elements, is sent sparsely"
            f" (density={compressor.density:g} of at most {longest:,} elements).",
            stacklevel=2,
        )


class WholeSparseExchange(CompressedExchange):
    """Sends each rank's selected entries to all ranks, which sum them (TopkA, Gaussian-k).

    It is also the base of the other sparse exchanges.

    Args:
        traffic: The buckets, and their collectives. In this class buckets have the role of
            all-reduced ones, since every rank gets the whole mean.
        compressor: Says which entries are selected.
    """

    coded: Sequence[SparseBucket]

    def __init__(self, traffic: Traffic, compressor: SparseAllReduce) -> None:
        super().__init__(traffic, compressor)
        check_buckets(compressor, traffic)
        owned = StaticBucket if compressor.is_static else RegionBucket
        whole = TreeBucket if compressor.is_tree else SparseBucket
        kind: type[SparseBucket] = whole if compressor.all_reduces else owned
        self.coded = [kind(bucket, compressor, traffic) for bucket in traffic.flat.buckets]

    @override
    def expect_reduce(self, bucket: Bucket) -> None:
        coded, tag = self.coded[bucket.number], self.tag_of(bucket)
        if coded.is_sparse:
            coded.expect("reduce_scatter", tag)
        elif coded.sparse.is_scattered:
            self.collectives.expect_reduce_scatter(coded.received, tag)

    @override
    def _encode(self, bucket: Bucket, scale: Tensor | None) -> Sending:
        """Selects large entries of the bucket's gradients, or all elements if it travels dense."""
        coded, tag = self.coded[bucket.number], self.tag_of(bucket)
        if not coded.is_sparse:
            self._look_for_inf(coded.flushed(scale))
            dense = partial(Exchange.launch_reduce, self, bucket)
            return Sending(partial(coded.launch_all, tag) if coded.sparse.is_scattered else dense)
        waiting = coded.accumulated(scale)
        selected = coded.select(waiting)
        # A value of nan or inf is among the selected entries, since it counts as the largest.
        if len(selected.numbers):
            self._look_for_inf(selected.numbers)
        return Sending(partial(coded.pack(waiting, selected, scale), tag), coded.sum_up)

    @property
    @override
    def compression_ratio(self) -> float:
        """4-byte words of dense all-reduces, divided by those that usual steps send.

        1 with a single rank. See `SparseAllReduce.usual_words`.
        """
        num_ranks, dense, sent = self.collectives.world.size, 0.0, 0.0
        for coded in self.coded:
            # A dense all-reduce consists of a reduce-scatter and an all-gather.
            own = 2 * coded.numel * (num_ranks - 1) / num_ranks
            dense += own
            sent += coded.sparse.usual_words(coded.numel, num_ranks) if coded.is_sparse else own
        return dense / sent if num_ranks > 1 else 1.0


class TreeBucket(SparseBucket):
    """A sparse bucket whose k largest sums go up a tree of ranks and back down (gTopk).

    Rank 0 is the root. The parent of another rank has the same number without the lowest 1 bit.
    """

    _sums: Entries
    """The sums that have come down the tree, equal on all ranks. Set by the work's `wait`."""

    @override
    def expect(self, lane: str, tag: int) -> None:
        """Does nothing: which ranks send is known only when the rounds of the tree begin."""

    @override
    def pack(self, waiting: Tensor, selected: Entries, scale: Tensor | None) -> LaunchWithTag:
        """Sets the places of `selected` to 0 in `waiting`.

        The returned function sends nothing: the `wait` of the work that it returns runs the tree.
        """
        waiting.index_fill_(0, selected.places, 0.0)
        own = selected.times(scale)
        return lambda tag: Work(partial(self._through_tree, own, scale, tag))

    def _through_tree(self, own: Entries, scale: Tensor | None, tag: int) -> None:
        """Runs all rounds of the tree: sends entries up, and the root's k sums down.

        Collective, blocks. All ranks must call it for the buckets in the same order.

        Args:
            own: Entries that this rank has selected, multiplied by the loss scale.
            scale: Loss scale. None means 1.
            tag: Tag of the messages, equal on all ranks.
        """
        rank, world_size = self._rank, self._world_size
        below = rank & -rank if rank else 1 << (world_size - 1).bit_length()
        # Distances from this rank to its children: 1, 2, 4, ...
        steps = (1 << place for place in range(below.bit_length() - 1))
        children = [rank + step for step in steps if rank + step < world_size]
        for child in children:
            received = self._receive(child, tag)
            merge = self._largest_of_both, own, received, scale
            own = as_device_work(self._collectives, "encode", tag, *merge)
        if rank:
            self._send(own, [rank - below], tag)
            own = self._receive(rank - below, tag)
        self._send(own, children[::-1], tag)
        self._sums = own

    def _largest_of_both(self, own: Entries, other: Entries, scale: Tensor | None) -> Entries:
        """Adds the entries up; returns the k largest sums, and adds the others to the residual."""
        total = added(own, other)
        kept = total.largest(self.selection.k)
        is_kept = total.are_among(kept.places, self.spec.padded_numel)
        numbers = total.numbers if scale is None else total.numbers / scale
        self.worker.settle(Entries(total.places, numbers), is_kept)
        return kept

    def _receive(self, source: int, tag: int) -> Entries:
        """Receives the entries that rank `source` sends, as views of `incoming`. Blocks."""
        place = self.incoming, tag
        self._collectives.launch_messages("reduce_scatter", {}, [source], *place).wait()
        self.tally.words_received += 2 * int(self.incoming[source, 0])
        return unpacked(self.incoming[source])

    def _send(self, own: Entries, ranks: Sequence[int], tag: int) -> None:
        """Sends the entries `own` to each of `ranks`. Blocks until they have been sent."""
        self.tally.words_sent += 2 * len(own.places) * len(ranks)
        messages, place = dict.fromkeys(ranks, own.packed()), (self.incoming, tag)
        self._collectives.launch_messages("reduce_scatter", messages, [], *place).wait()

    @override
    def sum_up(self) -> None:
        mean = self.bucket.mean.zero_()
        mean[self._sums.places.long()] = self._sums.numbers.to(mean.dtype)


class TreeExchange(WholeSparseExchange):
    """Sums the selected entries up a tree of ranks, and sends the result back down (gTopk).

    A rank adds each child's entries to its own, and keeps the k largest sums.
    """

    _failure: BaseException | None = None
    """What the rounds of a bucket have raised. None means that none has failed."""

    @override
    def launch_reduce(self, bucket: Bucket) -> Work:
        work = super().launch_reduce(bucket)
        if self.coded[bucket.number].is_sparse:
            return work.inside(self._go_through)
        return work

    def _go_through(self, rounds: Callable[[], None]) -> None:
        """Runs the rounds of one bucket's tree.

        If they fail, the rounds of all later buckets raise the same at once: the failure may keep
        other ranks from reaching those rounds, so that waiting there would be in vain.
        """
        if self._failure is not None:
            raise self._failure
        try:
            rounds()
        except BaseException as failure:
            self._failure = failure
            raise


class SparseExchange(WholeSparseExchange):
    """Sums selected entries at the owners of their regions, and gathers sums (Ok-Topk, TopkDSA).

    With Ok-Topk owners choose the largest sums, about k in all, which are gathered. With TopkDSA
    all sums are. A bucket that travels dense is reduced to equal shards. Its mean is as long as the
    bucket, like that of all buckets here, and is 0 outside this rank's shard.
    """

    coded: Sequence[OwnedBucket]

    # --- the reduce half --------------------------------------------------------------------------

    @override
    def add_earlier(self, bucket: Bucket, earlier: Tensor | None, *, is_empty: bool) -> None:
        super().add_earlier(bucket, earlier, is_empty=is_empty)
        self.coded[bucket.number].restore()

    @override
    def note_used(self, used: Sequence[bool], *, keeps: bool) -> None:
        super().note_used(used, keeps=keeps)
        # Once in each reduction. A refusal is equal on all ranks, so that all skip the collectives
        # of `_choose`.
        if keeps and self._refusal is None:
            self._send(None, self._choose).wait()

    def _choose(self) -> Sending:
        """Lets this rank, as an owner, choose the sums that it keeps in all sparse buckets.

        In an exact step of Ok-Topk, and with TopkDSA, nothing is chosen before ranks have agreed.

        Returns:
            The message by which ranks agree, on sums or (static buckets) on new regions. Its
            `launch` blocks. It launches nothing if there is nothing to agree on.
        """
        sparse = [coded for coded in self.coded if coded.is_sparse]
        static = [coded for coded in sparse if isinstance(coded, StaticBucket)]
        for coded in static:
            coded.keep_largest()
        regional = [coded for coded in sparse if isinstance(coded, RegionBucket)]
        # Only `RegionBucket` reads values on the host, and so needs the loss scale as a float.
        scale = self._loss_scale() if regional else None
        factor = 1.0 if scale is None else float(scale)
        chosen = [(coded, coded.choose(factor)) for coded in regional]
        if asked := [(coded, own) for coded, own in chosen if own is not None]:
            return Sending(partial(self._agree, asked), partial(_keep, asked, factor))
        return Sending(partial(self._add_up_summaries, static))

    def _agree(self, asked: list[tuple[RegionBucket, Entries]]) -> Work:
        """Agrees with all ranks on what owners keep. Collective, blocks.

        In an exact step of Ok-Topk these are the k largest sums of all owners. With TopkDSA owners
        keep all sums, and ranks set `is_filled`: whether all elements are gathered, without places.

        Args:
            asked: Buckets, and the sums that this rank as an owner may keep. If only some may be
                kept, the list is changed to these.
        """
        buckets, sums = [coded for coded, _ in asked], [own for _, own in asked]
        place = self.collectives, self.first_tag
        if all(coded.sparse.is_regional for coded in buckets):
            kept = largest_of_all(sums, [coded.selection.k for coded in buckets], *place)
            asked[:] = zip(buckets, kept, strict=True)
        else:
            numels = [coded.numel for coded in buckets]
            for coded, is_filled in zip(buckets, are_filled(sums, numels, *place), strict=True):
                coded.is_filled = is_filled
        return Work.done()

    def _add_up_summaries(self, buckets: Sequence[StaticBucket]) -> Work:
        """Sums summaries over ranks, for buckets with new regions due; does nothing without any.

        Collective, blocks (the host, or on NCCL the stream).
        """
        due = [bucket for bucket in buckets if bucket.are_regions_due]
        if due:
            total = torch.stack([bucket.summary for bucket in due]).to(torch.int32)
            with as_metadata(self.collectives):
                tag = SELECTION_TAGS + self.first_tag
                self.collectives.launch_all_reduce(total.view(-1), tag).wait()
            for bucket, part in zip(due, total, strict=True):
                bucket.follow(part)
        return Work.done()

    # --- the gather half --------------------------------------------------------------------------

    @override
    def expect_gather(self, bucket: Bucket) -> None:
        coded, tag = self.coded[bucket.number], self.tag_of(bucket)
        if coded.is_sparse and not coded.is_filled:
            coded.expect("all_gather", tag)
        else:
            self.collectives.expect_all_gather(bucket.gradients, tag)

    @override
    def launch_gather(self, bucket: Bucket) -> Work:
        """Sends the sums that this rank has kept, with their places, to all ranks.

        If the bucket travels dense, or is filled, gathers all elements of equal shards instead,
        uncompressed.
        """
        coded = self.coded[bucket.number]
        if coded.is_sparse and not coded.is_filled:
            return self._send(bucket, partial(self._pack, coded))
        if coded.is_sparse:
            # All elements are gathered, so that every entry that was sent has had its effect.
            coded.take_sent().clear()
            coded.count_words(coded.spec.padded_numel // self.collectives.world.size)
        # `then` makes the work not done, even with one rank: a bucket is stepped by the thread that
        # waits for it.
        return self.collectives.launch_all_gather(bucket.gradients, self.tag_of(bucket)).then()

    def _pack(self, coded: OwnedBucket) -> Sending:
        """Makes the message with this rank's kept sums, and what handles arrived messages."""
        message, gathered, tag = coded.message(), coded.gathered, self.tag_of(coded.bucket)
        arrive = partial(coded.arrive, gathered, coded.take_sent(), self._is_nan)
        return Sending(partial(coded.spread, message, gathered, tag), arrive)

    @override
    def launch_gather_gradients(self, bucket: Bucket) -> Work:
        coded = self.coded[bucket.number]
        tag = self.tag_of(bucket) + GRADIENT_TAGS
        if self._refusal is not None:
            # The step is refused on all ranks. No rank has chosen sums that could be gathered.
            bucket.gradients.fill_(math.nan)
            return Work.done()
        if coded.is_filled or not coded.is_sparse:
            return self.collectives.launch_all_gather(bucket.gradients, tag)
        gathered, words_sent = torch.empty_like(coded.gathered), coded.tally.words_sent
        work = coded.spread(coded.message(), gathered, tag)
        # Not counted, as the sums are sent once more before the step.
        coded.tally.words_sent = words_sent
        return work.then(partial(coded.write, gathered))

    @override
    def look_again(self) -> None:
        """Takes hooks' changes of the sums that this rank has kept, and looks for inf in them.

        Hooks must not change elements of the mean that were 0: if any rank's hook has, `check`
        refuses the step on all ranks. Collective, blocks. If the step is refused already, it only
        makes all means nan, and launches nothing.
        """
        if self._refusal is not None:
            for coded in self.coded:
                coded.bucket.mean.fill_(math.nan)
            return
        is_denser = [coded.take_back() for coded in self.coded if coded.is_sparse]
        for coded in self.coded:
            coded.clear_others()
        flags = self._look_at_means(torch.stack(is_denser).any() if is_denser else None)
        # flags[1]: a hook changed elements that were 0. flags[0]: a mean has nan or inf. That
        # excuses it, since clipping by a norm of nan changes all elements.
        if flags[1] and not flags[0]:
            self._refusal = RuntimeError(
                "A hook has changed elements of the mean gradient that were 0, which"
                f" compressor={self._compressor.name!r} does not send. Only scale or clip gradients"
                " in hooks, or use another compressor. No weight has changed."
            )


def _keep(chosen: Sequence[tuple[RegionBucket, Entries]], scale: float) -> None:
    """Makes each bucket keep its chosen sums; see `RegionBucket.keep`."""
    for coded, own in chosen:
        coded.keep(own, scale)
