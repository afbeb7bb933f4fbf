"""A sparse bucket that is cut into regions, each of which one rank sums and selects from."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.bucket import Bucket
from lightning_dear.collectives.work import Collectives
from lightning_dear.compression import OkTopk, SparseAllReduce
from lightning_dear.compression.selectors import true_places
from lightning_dear.exchange.entries import Entries, is_among
from lightning_dear.exchange.sparse_bucket import SparseBucket

NUM_FIRST_STEPS = 64
"""Steps at the beginning in each of which regions are made anew: residuals still grow."""


@dataclass(frozen=True)
class Sent:
    """What a rank has sent of a bucket, round by round.

    Attributes:
        standing: What the residual still holds, and is erased there where it has arrived.
        cleared: What is erased there already, and is added back where it has not arrived.
    """

    standing: list[Entries]
    cleared: list[Entries]


class OwnedBucket(SparseBucket):
    """What one bucket sends in both halves, and what it leaves.

    Its mean is 0 but for what is in this rank's region, until gradients are shown or have arrived.

    Args:
        bucket: See `SparseBucket`.
        configured: See `SparseBucket`.
        collectives: See `SparseBucket`.
        is_encoded: See `SparseBucket`.

    Attributes:
        gathered: [world_size, n] int32, what each owner sends to all.
        is_filled: Whether sums are so many that all of them travel, without places.
        chosen: [n] int64: what this rank's region keeps.
        has_regions: Whether regions follow anybody's selections.
    """

    gathered: Tensor
    has_regions: bool

    def __init__(
        self,
        bucket: Bucket,
        configured: SparseAllReduce,
        collectives: Collectives,
        *,
        is_encoded: bool,
    ) -> None:
        self._standing: list[Entries] = []
        self._cleared: list[Entries] = []
        # Added back if another round of the step comes: sums of parameters that no rank had a
        # gradient for, and sums that this owner has not chosen.
        self._set_aside: list[tuple[slice, Tensor]] = []
        self._rejected: Tensor | None = None
        self.is_filled = False
        self.chosen = torch.empty(0, dtype=torch.int64, device=bucket.mean.device)
        super().__init__(bucket, configured, collectives, is_encoded=is_encoded)

    @override
    def _make_room(self) -> None:
        super()._make_room()
        self.gathered = self._rows(self.most_owned if self.is_sparse else 0, self._most_notes)

    @property
    @abstractmethod
    def most_owned(self) -> int:
        """Most numbers that one owner keeps."""

    @property
    def ok(self) -> OkTopk:
        """The codec, where it selects once more."""
        assert isinstance(self.codec, OkTopk)
        return self.codec

    # --- the reduce half --------------------------------------------------------------------------

    @override
    def accumulated(self, scale: Tensor | None) -> Tensor:
        # Another round of the same step must not send again what an earlier one has sent.
        for one in self._standing:
            self.worker.clear(one.places)
        self._cleared += self._standing
        self._standing = []
        return super().accumulated(scale)

    @abstractmethod
    def messages(
        self, waiting: Tensor, selected: Entries, scale: Tensor | None
    ) -> Mapping[int, Tensor] | Tensor:
        """Cuts `selected`, which is of `waiting`, into each owner's, and notes what is sent."""

    @abstractmethod
    def clear_others(self) -> None:
        """Makes the mean 0 outside this rank's region."""

    @abstractmethod
    def take_back(self) -> Tensor:
        """Leaves of the mean what was chosen; a bool: whether there was more in this region."""

    def restore_rejected(self) -> None:
        """Adds to the mean what an earlier selection of the same step has left out.

        Or what nobody used then; perhaps somebody has meanwhile.
        """
        if self._rejected is not None:
            self._selected_from.add_(self._rejected)
        for part, numbers in self._set_aside:
            self.bucket.mean[part].add_(numbers)
        self._rejected, self._set_aside = None, []

    @property
    @abstractmethod
    def _selected_from(self) -> Tensor:
        """A view of the mean: where this rank selects."""

    # --- regions ----------------------------------------------------------------------------------

    @property
    def are_regions_due(self) -> bool:
        """Whether those of the next step follow the selections of this one."""
        is_early = self.counts["reduce"] <= NUM_FIRST_STEPS
        return is_early or self.is_due(self.ok.tau) or not self.has_regions

    # --- the gather half --------------------------------------------------------------------------

    @abstractmethod
    def message(self) -> Tensor:
        """What all ranks are to get of this rank's region; see `gathered`."""

    @abstractmethod
    def write(self, gathered: Tensor) -> Tensor:
        """Makes what owners have sent the bucket's gradients.

        Returns:
            [n] int64: its places, and perhaps the bucket's end.
        """

    @abstractmethod
    def note_gathered(self, gathered: Tensor) -> None:
        """Counts what owners have sent in the tally."""

    def note_all(self) -> None:
        """Counts all sums, without places, in the tally."""
        others = self.spec.padded_numel // self._world_size * (self._world_size - 1)
        self.tally.words_sent += others
        self.tally.words_received += others

    def take_sent(self) -> Sent:
        """What this rank has sent for the step under way, but 0 for parameters nobody has used."""
        taken, self._standing, self._cleared = Sent(self._standing, self._cleared), [], []
        for one in (*taken.standing, *taken.cleared):
            for part in self._unused:
                is_unused = (one.places >= part.start) & (one.places < part.stop)
                one.numbers.masked_fill_(is_unused, 0.0)
        return taken

    def settle(self, sent: Sent, selected: Tensor) -> None:
        """What was sent and selected is not to be sent any more, and the rest is to be sent still.

        Args:
            sent: By this rank; zeros were not.
            selected: [n] int64: places of what all ranks have got, and perhaps the bucket's end.
        """
        for one in sent.standing:
            has_arrived = self._note_arrived(one, selected)
            self.worker.clear(one.places.index_select(0, true_places(has_arrived)))
        for one in sent.cleared:
            has_arrived = self._note_arrived(one, selected)
            self.worker.put_back(one.places, one.numbers.masked_fill(has_arrived, 0.0))

    def _note_arrived(self, sent: Entries, selected: Tensor) -> Tensor:
        has_arrived = self._has_arrived(sent, selected)
        self.worker.note_arrived(sent.places, has_arrived)
        return has_arrived

    def _has_arrived(self, sent: Entries, selected: Tensor) -> Tensor:
        """Which of the numbers that were sent is selected, once `write` has written them."""
        is_selected = is_among(sent.places, selected, self.spec.padded_numel)
        return is_selected & (sent.numbers != 0)

    def settle_all(self, sent: Sent) -> None:
        """The same where all that was sent has arrived."""
        for one in sent.standing:
            was_sent = true_places(one.numbers != 0)
            self.worker.clear(one.places.index_select(0, was_sent))

    # --- around a step ----------------------------------------------------------------------------

    @override
    def note_used(self, used: Sequence[bool], scale: Tensor | None, *, keeps: bool) -> None:
        """See `CompressedBucket`; but what was sent of them stays with who has sent it."""
        super().note_used(used, scale, keeps=keeps and not self.is_sparse)
        if keeps and self.is_sparse:
            for part in self._unused:
                own = self.bucket.mean[part]
                self._set_aside.append((part, own.clone()))
                own.zero_()

    @override
    def commit(self) -> None:
        # As if nothing had been sent of them, and no momentum had gone on.
        self.worker.keep(self._unused)
        super().commit()
        self._rejected, self._set_aside = None, []

    @override
    def discard(self) -> None:
        super().discard()
        self._standing, self._cleared = [], []
        self._rejected, self._set_aside = None, []

    @override
    def detach(self) -> None:
        super().detach()
        del self.gathered
