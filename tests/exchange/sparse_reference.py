"""Ok-Topk as its authors tell it, one bucket of all ranks in one process, number by number."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from lightning_dear.compression import OkTopk
from lightning_dear.exchange.sparse.regions import equal_regions


class Reference:
    """Sums what ranks select of what they have.

    Args:
        numel: Elements of the bucket that belong to parameters.
        padded: Elements of the bucket.
        world_size: Number of ranks.
        codec: Its options.

    Attributes:
        residuals: [world_size, padded] fp32.
        counts: Of the last step: what ranks have selected, and how much of it came back.
    """

    def __init__(self, numel: int, padded: int, world_size: int, codec: OkTopk) -> None:
        self.codec, self.k, self.padded, self.world_size = (
            codec,
            codec.entries(numel),
            padded,
            world_size,
        )
        self.residuals = torch.zeros(world_size, padded)
        self.regions = equal_regions(padded, world_size)
        self.local, self.whole = [0.0] * world_size, 0.0
        self.quotas = [0] * world_size
        self.num_steps = 0
        self.counts: tuple[list[int], int] = ([], 0)

    def step(self, gradients: Tensor) -> Tensor:
        """U [padded], of [world_size, padded] gradients that are divided by world_size already."""
        waiting = self.residuals + gradients
        is_exact = self.codec.is_static or self.num_steps % self.codec.tau_prime == 0
        selected = [self._select(rank, waiting[rank], is_exact) for rank in range(self.world_size)]
        sent = [
            self._cap(own, places, self.codec.message_cap)
            for own, places in zip(waiting, selected, strict=True)
        ]
        sums = torch.zeros(self.padded)
        for own, places in zip(waiting, sent, strict=True):
            for place in places:
                sums[place] += own[place]
        chosen = self._choose(sums, is_exact)
        u = torch.zeros(self.padded)
        u[chosen] = sums[chosen]
        for rank, places in enumerate(sent):
            waiting[rank, sorted(set(places) & set(chosen))] = 0.0
        self.residuals = waiting
        if self.num_steps < 64 or self.num_steps % self.codec.tau == 0:
            self.regions = self._regions(selected)
        self.counts = [len(own) for own in selected], len(chosen)
        self.num_steps += 1
        return u

    def _select(self, rank: int, own: Tensor, is_exact: bool) -> list[int]:
        if not is_exact and self.local[rank] > 0:
            places = (own.abs() >= torch.tensor(self.local[rank])).nonzero()[:, 0].tolist()
            if 2 / 3 * self.k <= len(places) <= 4 / 3 * self.k:
                reached = own[places].abs().log().mean()
                slope = float(reached) - math.log(self.local[rank])
                self.local[rank] *= math.pow(len(places) / self.k, slope)
                return places
        places = _largest(own, range(self.padded), self.k)
        self.local[rank] = min((abs(float(own[place])) for place in places), default=0.0)
        return places

    def _cap(self, numbers: Tensor, places: Sequence[int], cap: float) -> list[int]:
        if cap == math.inf:
            return list(places)
        most = int(cap * self.k / self.world_size)
        parts = [
            [place for place in places if begin <= place < end]
            for begin, end in pairwise(self.regions)
        ]
        return [place for part in parts for place in _largest(numbers, part, most)]

    def _choose(self, sums: Tensor, is_exact: bool) -> list[int]:
        if self.codec.is_static:
            parts = (range(*pair) for pair in pairwise(self.regions))
            most = self.k // self.world_size
            return [place for part in parts for place in _largest(sums, part, most)]
        if is_exact or self.whole == 0:
            cap = self.codec.owner_cap
            known = self._cap(sums, sums.nonzero()[:, 0].tolist(), cap)
            chosen = _largest(sums, known, self.k)
            self.whole = min((abs(float(sums[place])) for place in chosen), default=0.0)
            if chosen:
                self._divide([len(part) for part in self._in_regions(chosen)])
            return chosen
        reached = (sums.abs() >= torch.tensor(self.whole)).nonzero()[:, 0].tolist()
        parts = [
            _largest(sums, range(*pair), quota)
            for pair, quota in zip(pairwise(self.regions), self.quotas, strict=True)
        ]
        chosen = [place for part in parts for place in part]
        smallest = [
            min(abs(float(sums[place])) for place in part) * len(part) for part in parts if part
        ]
        self.whole = math.fsum(smallest) / len(chosen) if chosen else 0.0
        if chosen and 2 * len(reached) >= self.k:
            self._divide([len(part) for part in self._in_regions(reached)])
        return chosen

    def _in_regions(self, places: Iterable[int]) -> list[list[int]]:
        return [
            [place for place in places if begin <= place < end]
            for begin, end in pairwise(self.regions)
        ]

    def _divide(self, weights: Sequence[int]) -> None:
        """Of k, but no more to any than an owner may keep; what is left over to the others."""
        most = min(self.k, self.codec.owner_cap * self.k / self.world_size)
        left, full = self.k, set[int]()
        while True:
            others = [rank for rank in range(self.world_size) if rank not in full]
            total = sum(weights[rank] for rank in others)
            share = {
                rank: left * weights[rank] // total if total else left // len(others)
                for rank in others
            }
            beyond = {rank for rank in others if share[rank] >= int(most)}
            self.quotas = [share.get(rank, int(most)) for rank in range(self.world_size)]
            if not beyond or len(beyond) == len(others):
                break
            full |= beyond
            left -= len(beyond) * int(most)
        self.quotas = [min(quota, int(most)) for quota in self.quotas]

    def _regions(self, selected: Sequence[Sequence[int]]) -> list[int]:
        """Quantiles of all places, as if those of a bin lay evenly in it."""
        counts = [0] * 256
        for place in (place for own in selected for place in own):
            counts[place * 256 // self.padded] += 1
        if not sum(counts):
            return equal_regions(self.padded, self.world_size)
        edges = [-(-self.padded * edge // 256) for edge in range(257)]
        ends = []
        for region in range(1, self.world_size):
            wanted, number = sum(counts) * region, 0
            while sum(counts[: number + 1]) * self.world_size < wanted:
                number += 1
            part = wanted - sum(counts[:number]) * self.world_size
            width = edges[number + 1] - edges[number]
            ends.append(edges[number] + width * part // (counts[number] * self.world_size))
        return [0, *ends, self.padded]


def _largest(numbers: Tensor, places: Iterable[int], count: int) -> list[int]:
    sizes = numbers.abs().tolist()
    known = [place for place in places if sizes[place]]
    return sorted(sorted(known, key=lambda place: (-sizes[place], place))[:count])
