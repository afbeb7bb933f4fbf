"""A bucket that is cut into regions, in messages that are as long as what is in them.

Ok-Topk's, and TopkDSA's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.collectives.work import Work
from lightning_dear.compression.selectors import all_reaching
from lightning_dear.exchange.sparse.bucket import Launch, Selection, SparseBucket
from lightning_dear.exchange.sparse.entries import Entries, joined, unpacked
from lightning_dear.exchange.sparse.regions import (
    REPORT_WORDS,
    Report,
    Shares,
    equal_regions,
    regions_of,
    sliced,
    summary_of,
    words_of_slice,
)
from lightning_dear.torch_modes import plain_mode

LOOKED_AT_FIRST = 0.95
"""Of the last threshold: most owners find their share among the sums of at least so much."""


class RegionBucket(SparseBucket):
    """For gloo: how many numbers travel is looked up, and said.

    What all ranks have to know for the next step travels as notes in the messages of this one: in
    backward each rank's summary of its selection, cut into a slice for each owner, who adds them
    up; afterwards the totals, and what owners report.

    Attributes:
        regions: Where each rank's region begins in the next step, and the end.
        has_regions: Whether regions follow anybody's selections.
        shares: How many numbers each owner keeps in it.
        chosen: [n] int64: what this rank's region keeps.
    """

    # Settled when a step's selection begins, until all of it has arrived, whatever is loaded
    # meanwhile: how many numbers travel, whether owners find the k largest of all sums, and words
    # of notes to all.
    _settled: Selection
    _is_exact: bool
    _num_told: int

    # --- across plans and checkpoints -------------------------------------------------------------

    @override
    def _make_room(self) -> None:
        # Owners report to all, and hear of regions, where these follow selections.
        self._most_notes = words_of_slice(self._world_size) if self.sparse.is_regional else 0
        self._report_words = REPORT_WORDS if self.sparse.is_regional else 0
        self._head_words = 1 + self._report_words + self._most_notes
        super()._make_room()
        # Shares are of another k. Until the next exact step nothing is known of the new one.
        self.shares = Shares.unknown(self._world_size)
        # Until the next selection: on one rank messages of the old k arrive before the change and
        # on another one after it, so they must change no shares.
        self._follows_shares = False

    @override
    def start_anew(self, seed: int | None) -> None:
        super().start_anew(seed)
        self.shares = Shares.unknown(self._world_size)
        self.regions = equal_regions(self.spec.padded_numel, self._world_size)
        self.has_regions = False

    @property
    @override
    def steering(self) -> Tensor:
        own = [*self._size, self.shares.threshold, *self.shares.quotas]
        own += [self.has_regions, *self.regions]
        return torch.cat([super().steering, torch.tensor(own, dtype=torch.float64)])

    @override
    def steer(self, steering: Tensor) -> None:
        count, _, *own = steering.tolist()
        is_alike = len(steering) == len(self.steering)
        # Of mode "static" the second number is no threshold.
        super().steer(steering[:2] if is_alike or not own else steering.new_tensor([count, 0.0]))
        # Another compressor has saved something else, and others need equal regions.
        is_alike = is_alike and self.sparse.is_regional
        if not is_alike or own[-1] != self.spec.padded_numel:
            return
        size, (everywhere, *quotas) = own[:2], own[2 : 3 + self._world_size]
        has_regions, *regions = own[3 + self._world_size :]
        if size == self._size:
            self.shares = Shares(everywhere, tuple(int(quota) for quota in quotas))
        self.has_regions, self.regions = bool(has_regions), [int(place) for place in regions]

    @property
    def _size(self) -> list[float]:
        """What shares are of."""
        selection = self.selection
        return [selection.k, selection.most_owned] if self.sparse.is_regional else [0, 0]

    # --- the reduce half --------------------------------------------------------------------------

    @override
    def select(self, waiting: Tensor) -> Entries:
        selected = super().select(waiting)
        step, self._settled = self.counts["reduce"] - 1, self.selection
        self.region = slice(self.regions[self._rank], self.regions[self._rank + 1])
        self._is_exact = self.shares.threshold <= 0 or self.sparse.is_exact(step)
        is_due = self.sparse.are_regions_due(step) or not self.has_regions
        self._num_notes = self._most_notes if is_due else 0
        self._num_told = self._report_words + self._num_notes
        self._follows_shares = True
        return selected

    @override
    def pack(self, waiting: Tensor, selected: Entries, scale: Tensor | None) -> Launch:
        """Cuts `selected`, which is of `waiting`, into each owner's; what is sent is taken out."""
        parts = [part.largest(self.selection.most_sent) for part in selected.cut(self.regions)]
        self.tally.num_sent = num_sent = sum(len(part.places) for part in parts)
        # Where no cap binds, all of it is sent.
        sent = selected if num_sent == len(selected.places) else joined(parts)
        waiting.index_fill_(0, sent.places, 0.0)
        self._sent.append(sent)
        notes = torch.empty((self._world_size, 0), dtype=torch.int32)
        if self._num_notes:
            notes = sliced(summary_of(selected.places, len(waiting)), self._world_size)
        messages = {rank: one.times(scale).packed(notes[rank]) for rank, one in enumerate(parts)}
        return partial(self.launch, "reduce_scatter", messages, self.incoming, self._num_notes)

    # --- what is kept of the sums -----------------------------------------------------------------

    def choose(self, scale: float) -> Entries | None:
        """Keeps this owner's share of k, the largest of its sums; or all, if nothing is selected.

        Args:
            scale: What sums are multiplied by.

        Returns:
            Those of which all ranks have to agree what is kept, in `keep`; None: it is kept.
        """
        if self._is_exact:
            return self._sums().largest(self.selection.most_owned)
        quota, threshold = self.shares.quotas[self._rank], self.shares.threshold * scale
        found = self._sums(LOOKED_AT_FIRST * threshold)
        # Rarely: the sums have become smaller since the threshold was found.
        if len(found.places) < quota:
            found = self._sums()
        num_reached = int((found.numbers.abs() >= threshold).count_nonzero())
        self.keep(found.largest(quota), scale, num_reached)
        return None

    def _sums(self, floor: float = 0.0) -> Entries:
        """What of the region's sums is not 0 and at least `floor`."""
        own = self.bucket.mean[self.region]
        places = all_reaching(own, floor)
        return Entries(places + self.region.start, own.index_select(0, places).float())

    def keep(self, chosen: Entries, scale: float, num_reached: int | None = None) -> None:
        """Leaves nothing but `chosen` in the region; the rest may be asked for once more.

        Args:
            chosen: Of the region's sums.
            scale: What sums are multiplied by.
            num_reached: How many sums have reached the threshold; None: those that are chosen.
        """
        self._leave(chosen.places, chosen.numbers)
        self.chosen, count = chosen.places, len(chosen.places)
        smallest = float(chosen.numbers.abs().min()) / scale if count else 0.0
        self._report = Report(count, count if num_reached is None else num_reached, smallest)

    def take_back(self) -> Tensor:
        """Leaves of the mean what was chosen; a bool: whether there was more in this region."""
        own, places = self.bucket.mean[self.region], self.chosen - self.region.start
        kept = own[places]
        is_denser = own.index_fill_(0, places, 0.0).any()
        own.zero_().index_copy_(0, places, kept)
        return is_denser

    # --- the gather half --------------------------------------------------------------------------

    def message(self) -> Tensor:
        """[n] int32: what all ranks are to get of this rank's region; see `gathered`."""
        entries = Entries(self.chosen, self.bucket.mean.index_select(0, self.chosen).float())
        if not self._num_told:
            return entries.packed()
        reached = torch.tensor([self._report.num_reached], dtype=torch.int32)
        # A message is one tensor of int32, so that a float travels as its bits.
        smallest = torch.tensor([self._report.smallest], dtype=torch.float32).view(torch.int32)
        # Of all ranks' summaries this owner's slice, added up.
        slices = self.incoming[:, 1 : 1 + self._num_notes]
        return entries.packed(reached, smallest, slices.sum(0, dtype=torch.int32))

    def spread(self, message: Tensor, gathered: Tensor, number: int) -> Work:
        """Starts sending `message` to all ranks, and everybody's into `gathered`."""
        messages = dict.fromkeys(range(self._world_size), message)
        return self.launch("all_gather", messages, gathered, self._num_told, number)

    def write(self, gathered: Tensor) -> Tensor:
        """Makes what owners have sent the bucket's gradients.

        Returns:
            [n] int64: its places.
        """
        whole = joined([unpacked(row, self._num_told) for row in gathered])
        # Also the mean: 0 everywhere but where this rank's own part is written once more.
        gradients, places = self.bucket.gradients, whole.places.long()
        numbers = whole.numbers.to(gradients.dtype)
        gradients.index_copy_(0, places, numbers)
        self._has_zeros = bool((numbers == 0).any())
        return places

    def arrive(self, gathered: Tensor, sent: list[Entries], is_nan: Tensor | None) -> None:
        """What owners have sent has come: writes it, and hears what they report.

        Args:
            gathered: See above.
            sent: By this rank in that step; what of it is not among it is to be sent once more.
                Emptied.
            is_nan: Whether all of it is to be nan; None: it is not.
        """
        # In whatever context somebody reads a parameter.
        with plain_mode(self.bucket.parameters.device.type):
            selected, gradients = self.write(gathered), self.bucket.gradients
            for one in sent:
                # Nothing else is in the bucket's gradients now.
                has_arrived = (gradients.index_select(0, one.places) != 0) & (one.numbers != 0)
                if self._has_zeros:
                    has_arrived = one.are_among(selected, self.spec.padded_numel)
                self.worker.settle(one, has_arrived)
            sent.clear()
            heads = gathered[:, : 1 + self._num_told]
            counts = self.note_received(heads)
            self.tally.num_kept, self.tally.most_kept = sum(counts), max(counts)
            if self._num_told:
                self._hear(counts, heads[:, 1:])
            if is_nan is not None:
                gradients.masked_fill_(is_nan, math.nan)

    def _hear(self, counts: Sequence[int], notes: Tensor) -> None:
        """What owners have told all ranks says how the next step is made.

        Args:
            counts: How many numbers each has sent.
            notes: [world_size, words] int32.
        """
        selection = self._settled
        smallest = notes[:, 1].contiguous().view(torch.float32).tolist()
        told = zip(counts, notes[:, 0].tolist(), smallest, strict=True)
        reports = [Report(*one) for one in told]
        if self._follows_shares:
            k, cap = selection.k, selection.most_owned
            self.shares = self.shares.after(reports, k, cap, is_exact=self._is_exact)
        if not self._is_exact:
            self.tally.num_reached = sum(one.num_reached for one in reports)
            beyond = [one.num_reached - one.num_kept for one in reports]
            self.tally.num_held_back = sum(max(0, count) for count in beyond)
        if self._num_notes:
            summaries = notes[:, REPORT_WORDS:]
            regions = regions_of(summaries, self.spec.padded_numel, self._world_size).tolist()
            self.has_regions |= regions != self.regions
            self.regions = regions
