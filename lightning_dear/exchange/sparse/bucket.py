"""A sparse bucket: what this rank selects of it, sends of it, and keeps of it between steps."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.bucket import Bucket, shard_slice
from lightning_dear.collectives.work import Work
from lightning_dear.compression import Fp32, SparseAllReduce, error_feedback, selectors
from lightning_dear.exchange import base, compressed_bucket
from lightning_dear.exchange.sparse.entries import Entries, Unsent, new_unsent, unpacked

LaunchWithTag = Callable[[int], Work]
"""Launches a message: (tag of the bucket's messages) -> work."""


class Selection(NamedTuple):
    """Sizes of a bucket's sparse steps, which follow from compressor, length and world size.

    All are 0 under a compressor that is no sparse all-reduce, such as `Fp32` in a dense step.

    Attributes:
        is_sparse: Whether only selected entries travel. If not, all elements do, and the sizes
            below are those that a sparse step would have.
        k: Number of entries that a rank wants to select, and of sums that owners keep in all.
        most_selected: Largest number of entries that a rank selects.
        most_sent: Largest number of entries in one message of the reduce half.
        most_owned: Largest number of sums that one owner keeps. 0 if ranks own no regions.
    """

    is_sparse: bool = False
    k: int = 0
    most_selected: int = 0
    most_sent: int = 0
    most_owned: int = 0


class SparseBucket(compressed_bucket.CompressedBucket):
    """One bucket of a sparse exchange, with what it keeps between steps.

    In a sparse step selected entries travel: values with their places in the bucket. In a dense
    step, or if it is too short, the bucket travels dense: all of its elements do.

    If ranks own regions of the bucket, its mean is 0 outside this rank's region until gradients are
    exposed to hooks or have been gathered.

    Args:
        bucket: Bucket whose gradients and mean, of equal length, are read and mutated.
        compressor: Sparse all-reduce of the bucket.
        traffic: The collectives, and whether the plan leaves this bucket uncompressed.

    Attributes:
        sparse: The last sparse compressor: the present one, or the one before a dense step.
        selection: Sizes under the present compressor.
        is_sparse: Whether the bucket travels sparsely under the present compressor.
        is_filled: Whether the sums of this step are so many that all elements are gathered, without
            places. Only with `TopkDSA`.
        region: Slice of the mean in which this rank holds sums. Set by each reduction, except
            sparse ones without owners.
        incoming: [world_size, n] int32: row r is the message of rank r in the reduce half.
        gathered: [world_size, n] int32: row r is the message of owner r in the gather half.
        received: Scratch of a dense reduce-scatter. Empty if the bucket is sparse.
        threshold: Magnitude from which this rank selects, kept from step to step.
        tally: Figures of the last sparse step, or of the one that has begun.
    """

    worker: Unsent
    tally: compressed_bucket.Tally
    configured: SparseAllReduce

    _head_words = 1
    """Largest number of words before the places in a message: the number of entries, and notes."""

    _num_notes = 0
    """Number of words of notes in this step's messages to owners, after the number of entries.

    Only `RegionBucket` has notes, which tell owners what they need for new regions."""

    def __init__(self, bucket: Bucket, compressor: SparseAllReduce, traffic: base.Traffic) -> None:
        device, numel = bucket.mean.device, bucket.gradients.numel()
        collectives = traffic.collectives
        used = Fp32() if bucket.number in traffic.uncompressed else compressor
        worker, owner = new_unsent(compressor, numel, device), error_feedback.Memory(0, device)
        super().__init__(bucket, used, worker, owner, collectives.world.size)
        self.sparse = compressor
        self._collectives = collectives
        self._rank, self._world_size = collectives.world.rank, collectives.world.size
        self.numel = self.spec.numel
        self.tally, self.is_filled = compressed_bucket.Tally(), False
        # Entries that were sent in this step, until it is known which of them have had an effect.
        self._sent: list[Entries] = []
        # Sums that were left out of the mean in this step, to be added back if another round
        # follows: those of unused parameters, and those that this owner has not chosen.
        self._left_out: list[tuple[slice, Tensor]] = []
        self.start_anew(None)
        self._make_room()

    @override
    def _make_room(self) -> None:
        # Once for each compressor, and not in each step, since nothing else changes these buffers.
        padded_numel, self.selection = self.spec.padded_numel, Selection()
        if isinstance(self.compressor, SparseAllReduce):
            self.sparse = self.compressor
            self.selection = self._selection_of(self.sparse)
        self.is_sparse = self.selection.is_sparse
        scratch = 0 if self.is_sparse else self._collectives.scratch_numel(padded_numel)
        self.received = self.bucket.gradients.new_empty(scratch)
        self.incoming = self._rows(self.selection.most_sent)
        self.gathered = self._rows(self.selection.most_owned)

    def _selection_of(self, compressor: SparseAllReduce) -> Selection:
        """Returns the sizes of the bucket's sparse steps."""
        # Also for a bucket that is not sparse, because checkpoints save k: shares of k that owners
        # got under another k are not used again.
        k, world_size = compressor.entries(self.numel), self._world_size
        most_selected, most_sent, most_owned = compressor.caps(k, world_size)
        if most_owned is None:
            # Without a cap an owner may keep its whole region, 1/world_size of the bucket.
            most_owned = self.spec.padded_numel // world_size if compressor.is_scattered else 0
        is_sparse = compressor.saves(self.numel, world_size)
        return Selection(is_sparse, k, most_selected, most_sent, most_owned)

    def _rows(self, most: int) -> Tensor:
        """Returns a buffer with a row for each rank, long enough for a message of `most` entries.

        Rows are empty if the bucket is not sparse.
        """
        num_words = self._head_words + 2 * most if self.is_sparse else 0
        return self.bucket.gradients.new_empty((self._world_size, num_words), dtype=torch.int32)

    # --- across plans and checkpoints -------------------------------------------------------------

    @override
    def start_anew(self, seed: int | None) -> None:
        super().start_anew(seed)
        self.threshold, self._is_counted = selectors.LocalThreshold(), False

    @property
    @override
    def steering(self) -> Tensor:
        return torch.tensor([self.counts["reduce"], self.threshold.value], dtype=torch.float64)

    @override
    def steer(self, steering: Tensor) -> None:
        count, threshold = steering[:2].tolist()
        self.counts["reduce"] = int(count)
        self.threshold = selectors.LocalThreshold(threshold)

    # --- the reduce half: sparse ------------------------------------------------------------------

    def accumulated(self, scale: Tensor | None) -> Tensor:
        """Returns this rank's gradients plus residual, flat fp32, without the loss scale.

        What the caller does not set to 0 in the result is the new residual; see `Unsent`. Sets the
        padding of the gradients to 0.
        """
        gradients = self.bucket.gradients.index_fill_(0, self._padding, 0.0)
        return self.worker.accumulate(gradients.float(), scale)

    def select(self, waiting: Tensor) -> Entries:
        """Begins a sparse step, and returns the entries of `waiting` that are to be sent.

        They are about k entries of large magnitude, at most `most_selected`, chosen by the
        compressor: usually those that reach this rank's threshold.
        """
        step = self._begin()
        found = Entries(*self.sparse.find(waiting, self.selection.k, self.threshold, step))
        selected = found.largest(self.selection.most_selected)
        self.tally.num_selected, self.tally.num_sent = len(found.places), len(selected.places)
        return selected

    def _begin(self) -> int:
        """Begins a round of a sparse step, with a new tally. Returns the step's number, from 0.

        All rounds of a step have the same number. A step that was discarded does not count.
        """
        most_words = self.sparse.most_words(self.numel, self._world_size)
        self.tally = compressed_bucket.Tally(self.selection.k, most_words=most_words)
        self.counts["reduce"] += not self._is_counted
        self._is_counted = True
        return self.counts["reduce"] - 1

    def pack(self, waiting: Tensor, selected: Entries, scale: Tensor | None) -> LaunchWithTag:
        """Sets the places of `selected` to 0 in `waiting`, so that they leave the residual.

        Returns a function that launches the message with these entries to all ranks.
        """
        waiting.index_fill_(0, selected.places, 0.0)
        messages = dict.fromkeys(range(self._world_size), selected.times(scale).packed())
        return partial(self.launch, "reduce_scatter", messages, self.incoming, 0)

    def expect(self, lane: str, tag: int) -> None:
        """Posts the receives of other ranks' messages. Does not block.

        `lane` is the half: "reduce_scatter" or "all_gather".
        """
        room = self.incoming if lane == "reduce_scatter" else self.gathered
        self._collectives.expect_messages(lane, room, tag)

    def launch(
        self, lane: str, messages: Mapping[int, Tensor], room: Tensor, num_notes: int, tag: int
    ) -> Work:
        """Sends this rank's messages, and fills `room` with all ranks' messages to this rank.

        Args:
            lane: Half of the exchange, "reduce_scatter" or "all_gather".
            messages: Rank -> message, for this rank, too, which is only copied. A message is the
                number of entries, `num_notes` words of notes, the places, the values.
            room: `incoming` or `gathered`; row r is overwritten, and then begins with the
                message of rank r.
            num_notes: Number of words of notes.
            tag: Tag of the messages, equal on all ranks.
        """
        own, head = messages[self._rank], 1 + num_notes
        room[self._rank, : len(own)] = own
        others = (message for rank, message in messages.items() if rank != self._rank)
        self.tally.words_sent += sum(len(message) - head for message in others)
        sources = range(self._world_size)
        return self._collectives.launch_messages(lane, messages, sources, room, tag, head)

    def note_received(self, heads: Tensor) -> list[int]:
        """Adds the words of other ranks' entries to the tally.

        Args:
            heads: [world_size, 1 or more] int32: the first words of the messages of all ranks.

        Returns:
            Number of entries in the message of each rank, this rank's own included.
        """
        counts: list[int] = heads[:, 0].tolist()
        self.tally.words_received += 2 * (sum(counts) - counts[self._rank])
        return counts

    def count_words(self, one_way: int) -> None:
        """Counts in the tally `one_way` words to each other rank, and as many from it."""
        words = one_way * (self._world_size - 1)
        self.tally.words_sent += words
        self.tally.words_received += words

    def sum_up(self) -> None:
        """Overwrites the mean with the sums of the entries in `incoming`, added in rank order."""
        mean = self.bucket.mean.zero_()
        self.note_received(self.incoming)
        for row in self.incoming:
            part = unpacked(row, self._num_notes)
            # No place comes twice from one rank, so that the order of each sum is fixed.
            mean.scatter_add_(0, part.places.long(), part.numbers.to(mean.dtype))

    # --- the reduce half: dense -------------------------------------------------------------------

    def flushed(self, scale: Tensor | None) -> Tensor:
        """Adds the whole residual to the bucket's gradients, in place, and returns these.

        The residual becomes 0 with the step. `region` becomes this rank's equal shard.
        """
        self.region = shard_slice(self.spec.padded_numel, self._rank, self._world_size)
        gradients = self.bucket.gradients.index_fill_(0, self._padding, 0.0)
        self.worker.flush(gradients, scale)
        return gradients

    def launch_all(self, tag: int) -> Work:
        """Launches a dense reduce-scatter. Does not block.

        After the work's `wait` the mean holds this rank's shard, and 0 elsewhere.
        """
        place = self.received, self.bucket.mean[self.region], tag
        work = self._collectives.launch_reduce_scatter(self.bucket.gradients, *place)
        return work.then(self.clear_others)

    # --- choosing among the sums ------------------------------------------------------------------

    def clear_others(self) -> None:
        """Sets the mean to 0 outside this rank's region."""
        self.bucket.mean[: self.region.start].zero_()
        self.bucket.mean[self.region.stop :].zero_()

    def _leave(self, places: Tensor, numbers: Tensor) -> None:
        """Sets the mean to 0 in this rank's region, except for `numbers` in `places`.

        `places` are [n] int64 indices in the bucket. The sums that are left out are stored, so that
        `restore` can add them again.
        """
        own, places = self.bucket.mean[self.region], places - self.region.start
        self._left_out.append((self.region, own.index_fill(0, places, 0.0)))
        own.zero_().index_copy_(0, places, numbers.to(own.dtype))

    def restore(self) -> None:
        """Adds to the mean the sums that an earlier round of this step has left out.

        Those sums were not chosen by their owner, or belong to parameters that no rank had used
        then. A rank may have used these since.
        """
        for part, numbers in self._left_out:
            self.bucket.mean[part].add_(numbers)
        self._left_out = []

    # --- around a step ----------------------------------------------------------------------------

    def take_sent(self) -> list[Entries]:
        """Returns the entries that this rank has sent in this step, a part for each round.

        Sets the values of unused parameters' entries to 0, which means "not sent": `commit` keeps
        their residuals. The caller empties the list when it knows which entries have had an effect.
        `discard` empties it, too, so that nothing of a dropped step is added to the residual.
        """
        for entries in self._sent:
            for part in self._unused:
                is_unused = (entries.places >= part.start) & (entries.places < part.stop)
                entries.numbers.masked_fill_(is_unused, 0.0)
        return self._sent

    @override
    def note_used(self, used: Sequence[bool], scale: Tensor | None, *, keeps: bool) -> None:
        """See the base class, except for sparse steps of a scattered bucket.

        There the means of unused parameters are not added to the owner's residual, since senders
        keep theirs (see `commit`). If `keeps`, these means become 0, and are stored for `restore`.
        """
        if all(used):
            self._unused = ()
            return
        sets_aside = self.is_sparse and self.configured.is_scattered
        super().note_used(used, scale, keeps=keeps and not sets_aside)
        if keeps and sets_aside:
            for part in self._unused:
                own = self.bucket.mean[part]
                self._left_out.append((part, own.clone()))
                own.zero_()

    @override
    def commit(self) -> None:
        if self.configured.is_scattered:
            # For unused parameters, residual and momentum stay as they were before this step.
            self.worker.keep(self._unused)
        self.worker.commit()
        self.threshold.commit()
        self._is_counted = False
        # New lists, because a gather in flight still uses the old ones.
        self._sent, self._left_out = [], []

    @override
    def discard(self) -> None:
        self.worker.discard()
        self.threshold.discard()
        # The step's number is used again, so that what was due in it is due in the next step.
        self.counts["reduce"] -= self._is_counted
        self._is_counted = False
        self._sent.clear()
        self._left_out = []

    @override
    def detach(self) -> None:
        super().detach()
        del self.incoming, self.gathered, self.received
