"""How many of its sums each owner keeps, so that all together keep k, and no rank waits for it.

Beside what it keeps, an owner tells everybody how many of its sums have reached the global
threshold. In the next step each owner's share of k is its share of those. So nothing has to be
agreed on between the halves of a step: what all ranks have heard is the same on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FEWEST_REACHED = 1 / 2
"""Of k: with fewer sums above the last threshold shares stay as they are."""


@dataclass(frozen=True)
class Report:
    """What one owner has told all ranks.

    Attributes:
        num_kept: Sums that it has sent.
        num_reached: Sums that have reached the threshold; of an exact step those that it has sent.
        smallest: The smallest |sum| that it has sent, without a loss scale; 0 if none.
    """

    num_kept: int
    num_reached: int
    smallest: float


@dataclass(frozen=True)
class Shares:
    """How one bucket's owners select in the next step, alike on all ranks.

    Attributes:
        threshold: Of the k largest sums, as of the last step; 0: not known.
        quotas: Most numbers that each owner keeps.
    """

    threshold: float
    quotas: tuple[int, ...]

    @classmethod
    def unknown(cls, num_owners: int) -> Shares:
        """Before the first step: it is to be an exact one."""
        return cls(0.0, (0,) * num_owners)

    def after(self, reports: Sequence[Report], k: int, cap: int, *, is_exact: bool) -> Shares:
        """What follows from a step.

        The threshold is the smallest number of the k largest. Where owners kept what were their
        shares it is the mean of their smallest ones, as all are the same if shares are right.

        Args:
            reports: Each owner's.
            k: How many all of them are to keep.
            cap: Most that one of them may keep.
            is_exact: Whether they have kept the k largest of all.
        """
        kept = [one for one in reports if one.num_kept]
        if not kept:
            return Shares(0.0, self.quotas)
        if is_exact:
            threshold = min(one.smallest for one in kept)
        else:
            total = sum(one.num_kept for one in kept)
            threshold = math.fsum(one.num_kept * one.smallest for one in kept) / total
        weights = [one.num_reached for one in reports]
        # Of a few sums that are left above a threshold, as after a spike, nothing can be learned.
        says_enough = is_exact or FEWEST_REACHED * k <= sum(weights)
        quotas = tuple(divided(k, weights, cap)) if says_enough else self.quotas
        return Shares(threshold if any(quotas) else 0.0, quotas)


def divided(total: int, weights: Sequence[int], cap: int) -> list[int]:
    """Divides `total` by weights, in integers; nobody gets more than `cap`.

    What is beyond somebody's cap goes to the others, by their weights; if these are 0, equally.

    Returns:
        For each weight a part, together at most `total`, less what is rounded off.
    """
    parts, open_ones = [0] * len(weights), list(range(len(weights)))
    while open_ones:
        own = [weights[one] for one in open_ones]
        own = own if any(own) else [1] * len(open_ones)
        wanted = [total * weight // sum(own) for weight in own]
        full = [one for one, part in zip(open_ones, wanted, strict=True) if part >= cap]
        if not full:
            for one, part in zip(open_ones, wanted, strict=True):
                parts[one] = part
            break
        for one in full:
            parts[one] = cap
        total -= cap * len(full)
        open_ones = [one for one in open_ones if one not in full]
    return parts
