"""Some numbers of a bucket with their places, as they are sent, and what a rank has not sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.compression import OkTopk, SparseAllReduce
from lightning_dear.compression.error_feedback import Memory
from lightning_dear.compression.selectors import largest


@dataclass(frozen=True)
class Entries:
    """Some numbers of a bucket.

    Attributes:
        places: [n] int64 or int32, ascending; in mode "static" of `OkTopk` in any order.
        numbers: [n] fp32.
    """

    places: Tensor
    numbers: Tensor

    def packed(self, *notes: Tensor) -> Tensor:
        """[1 + words + 2 n] int32: n, [words] int32 notes, the places, and the numbers' bits."""
        # Of many short messages torch's calls would be most of the time.
        parts = [np.array([len(self.places)], dtype=np.int32), *(one.numpy() for one in notes)]
        parts += [self.places.numpy().astype(np.int32), self.numbers.numpy().view(np.int32)]
        return torch.from_numpy(np.concatenate(parts))

    def at(self, kept: Tensor) -> Entries:
        """Those that stand at [n] int64, ascending."""
        return Entries(self.places.index_select(0, kept), self.numbers.index_select(0, kept))

    def largest(self, most: int) -> Entries:
        """The `most` largest, of equal ones the first."""
        return self if len(self.places) <= most else self.at(largest(self.numbers, most))

    def times(self, scale: Tensor | None) -> Entries:
        """All numbers multiplied; None: by 1."""
        return self if scale is None else Entries(self.places, self.numbers * scale)

    def cut(self, regions: Sequence[int]) -> list[Entries]:
        """What lies in each region, of which `regions` says where they begin, and the end."""
        cuts = torch.searchsorted(self.places, torch.tensor(regions[1:-1])).tolist()
        parts = self.places.tensor_split(cuts), self.numbers.tensor_split(cuts)
        return [Entries(places, numbers) for places, numbers in zip(*parts, strict=True)]

    def are_among(self, others: Tensor, end: int) -> Tensor:
        """Which are no zeros and stand at one of [n] int64 `others`, from 0 to `end`; any order.

        A static message is filled up with zeros from place 0, whatever comes of that place.
        """
        is_other = torch.zeros(end + 1, dtype=torch.bool, device=others.device)
        return is_other.index_fill_(0, others, True)[self.places] & (self.numbers != 0)


def joined(parts: Sequence[Entries]) -> Entries:
    """All of them, one after the other."""
    places, numbers = ([one.places for one in parts], [one.numbers for one in parts])
    return Entries(torch.cat(places), torch.cat(numbers))


def unpacked(row: Tensor, num_notes: int = 0) -> Entries:
    """What `row` begins with, behind so many words of notes; views."""
    count, begin = int(row[0]), 1 + num_notes
    middle, end = begin + count, begin + 2 * count
    return Entries(row[begin:middle], row[middle:end].view(torch.float32))


def added(one: Entries, other: Entries) -> Entries:
    """The sums of both, where either has a number; places int64, ascending."""
    both = torch.cat([one.places.long(), other.places.long()])
    places, at = torch.unique(both, return_inverse=True)
    # Of one rank no place comes twice, and the first rank's come first.
    sums = one.numbers.new_zeros(len(places)).index_add_(
        0, at, torch.cat([one.numbers, other.numbers])
    )
    return Entries(places, sums)


# --- what is not sent -----------------------------------------------------------------------------


class Unsent(Memory):
    """acc = g + residual, of which what is sent is taken out, and added back if it is in vain.

    Whether it has arrived is known only when the step has been made, so `settle` may come after
    `commit`.
    """

    names: ClassVar[tuple[str, ...]] = ("residual",)

    def accumulate(self, gradients: Tensor, scale: Tensor | None) -> Tensor:
        """Adds up what may be sent.

        Args:
            gradients: Flat fp32; not mutated.
            scale: What they are multiplied by; None: 1.

        Returns:
            acc, flat, without the scale: what is pending. Whoever sends some of it makes that 0.
        """
        unscaled = gradients if scale is None else gradients / scale
        waiting = self._next("residual", unscaled)
        torch.add(self._latest("residual", unscaled), unscaled, out=waiting)
        self._has_pending = True
        return waiting

    def flush(self, gradients: Tensor, scale: Tensor | None) -> None:
        """Adds all that is to be sent still to `gradients`, in place: it is sent with them.

        Args:
            gradients: Flat, of any precision.
            scale: As in `accumulate`.
        """
        left = self._latest("residual", gradients)
        gradients.add_(left if scale is None else left * scale)
        self._next("residual", gradients).zero_()
        self._has_pending = True

    def settle(self, sent: Entries, has_arrived: Tensor) -> None:
        """Told what was sent and which of it has arrived: the rest is to be sent once more.

        Args:
            sent: Places are int64. Zeros among its numbers were not sent, and may stand several
                times at one place.
            has_arrived: [n] bool, False where nothing was sent.
        """
        lost = sent.numbers.masked_fill(has_arrived, 0.0)
        self._now["residual"].scatter_add_(0, sent.places, lost)


class UnsentVelocity(Unsent):
    """The same of momentum: u = m u + g, acc = u + residual, and u becomes 0 where it has arrived.

    Momentum correction and momentum factor masking, as in DGC (Lin et al. 2018, 3.2 and 3.3).
    """

    names: ClassVar[tuple[str, ...]] = ("momentum", "residual")

    @override
    def accumulate(self, gradients: Tensor, scale: Tensor | None) -> Tensor:
        unscaled = gradients if scale is None else gradients / scale
        momentum = self._next("momentum", unscaled)
        if self._has_pending:
            # Gradients that come in several rounds of one step add up.
            momentum.add_(unscaled)
            return super().accumulate(unscaled, None)
        torch.add(unscaled, self._latest("momentum", unscaled), alpha=self.momentum, out=momentum)
        return super().accumulate(momentum, None)

    @override
    def flush(self, gradients: Tensor, scale: Tensor | None) -> None:
        waiting = self.accumulate(gradients.float(), scale)
        gradients.copy_(waiting if scale is None else waiting * scale)
        waiting.zero_()

    @override
    def settle(self, sent: Entries, has_arrived: Tensor) -> None:
        super().settle(sent, has_arrived)
        momentum = self._now["momentum"]
        # Added, not written: where a place comes again as not arrived, that would undo the 0.
        lost = (-momentum[sent.places]).masked_fill_(~has_arrived, 0.0)
        momentum.scatter_add_(0, sent.places, lost)


class Forgotten(Unsent):
    """The same without feedback: nothing is kept."""

    names: ClassVar[tuple[str, ...]] = ()

    @override
    def accumulate(self, gradients: Tensor, scale: Tensor | None) -> Tensor:
        # New memory: who gets it may change it, and gradients must stay as they are.
        return gradients.clone() if scale is None else gradients / scale

    @override
    def flush(self, gradients: Tensor, scale: Tensor | None) -> None:
        """Adds nothing."""

    @override
    def settle(self, sent: Entries, has_arrived: Tensor) -> None:
        """Sends nothing once more."""


def new_unsent(compressor: SparseAllReduce, numel: int, device: torch.device) -> Unsent:
    """What a rank keeps of a bucket of so many elements for `codec`."""
    if not compressor.has_feedback:
        return Forgotten(numel, device)
    if isinstance(compressor, OkTopk) and compressor.momentum:
        return UnsentVelocity(numel, device, momentum=compressor.momentum)
    return Unsent(numel, device)
