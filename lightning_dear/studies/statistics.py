"""How sure a study is: intervals of paired differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean
from typing import NamedTuple

from scipy import stats

LEVEL = 0.9
"""Share of repetitions in which the interval holds the true mean difference."""


class Difference(NamedTuple):
    """By how much something is worse, in some unit; below 0: better. None for too few pairs.

    Attributes:
        mean: Of the pairs.
        lower: End of the interval.
        upper: End of the interval; what a margin is compared with.
    """

    mean: float | None = None
    lower: float | None = None
    upper: float | None = None


def paired_difference(worse_by: Sequence[float]) -> Difference:
    """Return the mean of n paired differences with its two-sided 90 % interval.

    mean ± t(0.95, n - 1) s / sqrt(n), where s is their standard deviation (n - 1 in the
    denominator) and t(q, k) the q-quantile of Student's distribution with k degrees of freedom.
    The upper end is also the upper bound of a one-sided test at 5 %.

    Args:
        worse_by: One for each seed, at least 2 for an interval. Where one is not finite, so is
            nothing here: all three figures are inf.
    """
    if len(worse_by) < 2:
        return Difference()
    if not all(math.isfinite(one) for one in worse_by):
        return Difference(math.inf, math.inf, math.inf)
    center = mean(worse_by)
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(worse_by) - 1) * stats.sem(worse_by))
    return Difference(center, center - half, center + half)
