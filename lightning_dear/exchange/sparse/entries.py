"""Some numbers of a bucket with their places, as they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_dear.compression.thresholds import largest


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
    """The sums of both, where either has a number; places ascending."""
    both = torch.cat([one.places, other.places.to(one.places.dtype)])
    places: Tensor = torch.unique(both)
    sums = one.numbers.new_zeros(len(places))
    for part in (one, other):
        at = torch.searchsorted(places, part.places.to(places.dtype))
        sums.index_add_(0, at, part.numbers)
    return Entries(places, sums)


def is_among(places: Tensor, others: Tensor, end: int) -> Tensor:
    """Which of [n] `places` are in `others`, both int64 from 0 to `end`, in any order."""
    is_other = torch.zeros(end + 1, dtype=torch.bool, device=places.device)
    return is_other.index_fill_(0, others, True)[places]
