"""Entries of a bucket (values with their places), as they are sent, and what was not sent."""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.compression import OkTopk, SparseAllReduce, error_feedback
from lightning_dear.compression.selectors import largest


class Entries(NamedTuple):
    """Some entries of a bucket: the values in some places.

    Attributes:
        places: [n] int64 or int32: indices in the bucket, ascending. In mode "static" of `OkTopk`
            they are in any order, and a place may come twice if one of its values is 0.
        numbers: [n] fp32: the values in these places.
    """

    places: Tensor
    numbers: Tensor

    def packed(self, *notes: Tensor) -> Tensor:
        """Returns the message [1 + words + 2 n] int32: n, the notes, places, and values' bits.

        `notes` are int32 tensors with that many words in all. Only for a CPU.
        """
        # By numpy: for many short messages the overhead of torch's calls would be most of the time.
        parts = [np.array([len(self.places)], dtype=np.int32), *(note.numpy() for note in notes)]
        parts += [self.places.numpy().astype(np.int32), self.numbers.numpy().view(np.int32)]
        return torch.from_numpy(np.concatenate(parts))

    def at(self, kept: Tensor) -> "Entries":
        """Returns the entries with the indices `kept`, [n] int64, ascending."""
        return Entries(self.places.index_select(0, kept), self.numbers.index_select(0, kept))

    def largest(self, most: int) -> "Entries":
        """Returns at most `most` entries: those of largest magnitude, of equal ones the first."""
        return self if len(self.places) <= most else self.at(largest(self.numbers, most))

    def times(self, scale: Tensor | None) -> "Entries":
        """Returns the entries with all values multiplied by `scale`. None means 1."""
        return self if scale is None else Entries(self.places, self.numbers * scale)

    def cut(self, regions: Sequence[int]) -> "list[Entries]":
        """Returns the entries of each region, as views. `places` must be ascending.

        Region r begins at `regions[r]` and ends before `regions[r + 1]`.
        """
        cuts = torch.searchsorted(self.places, torch.tensor(regions[1:-1])).tolist()
        parts = self.places.tensor_split(cuts), self.numbers.tensor_split(cuts)
        return [Entries(places, numbers) for places, numbers in zip(*parts, strict=True)]

    def are_among(self, others: Tensor, end: int) -> Tensor:
        """Tells which entries are not 0 and have their place in `others`.

        A static message is filled up with zeros in place 0. These are never among `others`, whether
        place 0 is or not.

        Args:
            others: [n] int64 places from 0 to `end`, in any order.
            end: Length of the bucket; `others` may contain it.

        Returns:
            Bool, a flag for each entry.
        """
        is_other = torch.zeros(end + 1, dtype=torch.bool, device=others.device)
        return is_other.index_fill_(0, others, True)[self.places] & (self.numbers != 0)


def joined(parts: Sequence[Entries]) -> Entries:
    """Returns the entries of all `parts`, one part after another, not sorted by place."""
    return Entries(*map(torch.cat, zip(*parts, strict=True)))


def unpacked(row: Tensor, num_notes: int = 0) -> Entries:
    """Returns views of the entries in the message `row`, which has `num_notes` words of notes."""
    count, begin = int(row[0]), 1 + num_notes
    middle, end = begin + count, begin + 2 * count
    return Entries(row[begin:middle], row[middle:end].view(torch.float32))


def added(own: Entries, other: Entries) -> Entries:
    """Returns entries in all places in which either has one, with the sums; places ascending."""
    both = torch.cat([own.places.long(), other.places.long()])
    places, at = torch.unique(both, return_inverse=True)
    # No place comes twice from one rank, and the values of `own` come first, so that the order of
    # the sum is fixed.
    numbers = torch.cat([own.numbers, other.numbers])
    return Entries(places, numbers.new_zeros(len(places)).index_add_(0, at, numbers))


# --- unsent values --------------------------------------------------------------------------------


class Unsent(error_feedback.Memory):
    """Keeps the residual, which is not sent yet. acc = gradient + residual may be sent.

    The caller takes the values that it sends out of acc, and what is left is the next residual. If
    no sum comes back for a place, the value that was sent there had no effect, and `settle` adds it
    back. That is known only when the gather half has arrived, often after `commit`.
    """

    names: ClassVar[tuple[str, ...]] = ("residual",)

    def accumulate(self, gradients: Tensor, scale: Tensor | None) -> Tensor:
        """Returns acc, from which the caller takes out what it sends, by setting that to 0.

        Args:
            gradients: Flat fp32; not mutated.
            scale: Loss scale, by which the gradients are multiplied. None means 1.

        Returns:
            acc, flat fp32, without the loss scale. It is the residual of the step under way.
        """
        unscaled = gradients if scale is None else gradients / scale
        waiting = self._next("residual", unscaled)
        torch.add(self._latest("residual", unscaled), unscaled, out=waiting)
        self._has_pending = True
        return waiting

    def flush(self, gradients: Tensor, scale: Tensor | None) -> None:
        """Adds the whole residual to `gradients`, in place, because all elements are sent now.

        The residual becomes 0 with `commit`.

        Args:
            gradients: Flat, of any floating-point dtype.
            scale: Same as in `accumulate`.
        """
        left = self._latest("residual", gradients)
        gradients.add_(left if scale is None else left * scale)
        self._next("residual", gradients).zero_()
        self._has_pending = True

    def settle(self, sent: Entries, has_arrived: Tensor) -> None:
        """Adds back to the residual what was sent without effect, so that it may be sent again.

        Args:
            sent: Entries that were sent; places are int64. Entries of value 0 were not sent, and
                may have the same place several times.
            has_arrived: [n] bool: whether all ranks have got a sum in the entry's place. False for
                values of 0.
        """
        lost = sent.numbers.masked_fill(has_arrived, 0.0)
        self._now["residual"].scatter_add_(0, sent.places, lost)


class UnsentVelocity(Unsent):
    """Like `Unsent`, with momentum: u = m u + gradient, acc = u + residual.

    u becomes 0 in places whose values have arrived (see `settle`). These are momentum correction
    and momentum factor masking, as in DGC (Lin et al. 2018, 3.2 and 3.3).
    """

    names: ClassVar[tuple[str, ...]] = ("momentum", "residual")

    @override
    def accumulate(self, gradients: Tensor, scale: Tensor | None) -> Tensor:
        unscaled = gradients if scale is None else gradients / scale
        momentum = self._next("momentum", unscaled)
        if self._has_pending:
            # A later round of a step adds to u, which has decayed in the first round.
            momentum.add_(unscaled)
            return super().accumulate(unscaled, None)
        torch.add(unscaled, self._latest("momentum", unscaled), alpha=self.decay, out=momentum)
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
        # Added, and not overwritten: a place may come twice, the second time with an entry of 0
        # that has not arrived, which would restore the old value.
        lost = (-momentum[sent.places]).masked_fill_(~has_arrived, 0.0)
        momentum.scatter_add_(0, sent.places, lost)


class Forgotten(Unsent):
    """Like `Unsent`, without error feedback: values that are not sent are dropped."""

    names: ClassVar[tuple[str, ...]] = ()

    @override
    def accumulate(self, gradients: Tensor, scale: Tensor | None) -> Tensor:
        # A new tensor, because the caller mutates the result, and the gradients must not change.
        return gradients.clone() if scale is None else gradients / scale

    @override
    def flush(self, gradients: Tensor, scale: Tensor | None) -> None:
        """Adds nothing, since there is no residual."""

    @override
    def settle(self, sent: Entries, has_arrived: Tensor) -> None:
        """Does nothing, since values without effect are not sent once more."""


def new_unsent(compressor: SparseAllReduce, numel: int, device: torch.device) -> Unsent:
    """Returns the memory of a rank for a bucket of `numel` elements.

    It keeps the residual, and u if the compressor has momentum; nothing without error feedback.
    """
    if not compressor.has_feedback:
        return Forgotten(numel, device)
    if isinstance(compressor, OkTopk) and compressor.momentum:
        return UnsentVelocity(numel, device, decay=compressor.momentum)
    return Unsent(numel, device)
