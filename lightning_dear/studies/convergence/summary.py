"""From trainings to one row for each entry and bucketing, with a verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_dear.studies.convergence.records import Metric, Trial
from lightning_dear.studies.convergence.statistics import Difference, paired_difference


@dataclass(frozen=True)
class Asked:
    """What is asked of an entry.

    Attributes:
        entry: Its name.
        reference: The dense entry it is compared with; None: it is one.
        is_control: Whether it is broken on purpose, and must be found out.
        below: What its training loss must end below, instead of being compared; None: compared.
    """

    entry: str
    reference: str | None = None
    is_control: bool = False
    below: float | None = None


@dataclass(frozen=True)
class Row:
    """How the trainings of one entry end, over the seeds.

    Attributes:
        asked: What was asked.
        buckets: Which tensors travelled together.
        trials: One for each seed, whose learning rate and dense share are the same.
        metric: How ends are judged.
        num_seeds: How many were asked for.
        worse: By how much the metric is worse than the reference's, in its unit; None: no pairs.
        loss_worse: By how much the training loss is higher.
    """

    asked: Asked
    buckets: str
    trials: tuple[Trial, ...]
    metric: Metric
    num_seeds: int
    worse: Difference | None
    loss_worse: Difference | None

    @property
    def metric_mean(self) -> float:
        """Over the seeds, in the metric's unit; nan where a training broke off."""
        return float(np.mean([trial.metric for trial in self.trials]))

    @property
    def metric_sd(self) -> float:
        """Standard deviation over the seeds; nan for one seed."""
        if len(self.trials) < 2:
            return math.nan
        return float(np.std([trial.metric for trial in self.trials], ddof=1))

    @property
    def loss_mean(self) -> float:
        """Training loss over the last steps and over the seeds."""
        return float(np.mean([trial.train_loss for trial in self.trials]))

    @property
    def num_broken_off(self) -> int:
        """Trainings that had no numbers any more."""
        return sum(not trial.is_finite for trial in self.trials)

    @property
    def verdict(self) -> str:
        """Whether what was asked is so; how many seeds there are while some are missing."""
        asked = self.asked
        if asked.reference is None:
            return "reference"
        if len(self.trials) < self.num_seeds:
            return f"{len(self.trials)} of {self.num_seeds} seeds"
        if asked.below is not None:
            is_below = all(trial.train_loss < asked.below for trial in self.trials)
            return f"{'' if is_below else 'NOT '}below {asked.below:g}"
        if self.worse is None or self.loss_worse is None:
            return ""
        is_equal = self.worse.upper <= self.metric.margin
        if not asked.is_control:
            return "non-inferior" if is_equal else "NOT non-inferior"
        # Not by the width of its interval alone: it is worse, too.
        if not is_equal and self.worse.lower > 0:
            return "fails, as it must"
        is_noticed = self.loss_worse.upper > self.metric.loss_margin and self.loss_worse.lower > 0
        return "fails by training loss, as it must" if is_noticed else "NOT NOTICED"


def summarize(
    asked: Sequence[Asked], trials: Sequence[Trial], metric: Metric, num_seeds: int
) -> list[Row]:
    """Return a row for each entry and bucketing that has been trained on a seed.

    Args:
        asked: In the order of the rows.
        trials: All that were measured; those of the tuning are left out.
        metric: How ends are judged.
        num_seeds: How many were asked for.
    """
    final: dict[tuple[str, str], dict[int, Trial]] = {}
    for trial in trials:
        if trial.phase == "final":
            final.setdefault((trial.entry, trial.buckets), {})[trial.seed] = trial
    return [
        _row(one, buckets, own, final.get((one.reference or "", buckets), {}), metric, num_seeds)
        for one in asked
        for (entry, buckets), own in final.items()
        if entry == one.entry
    ]


def _row(
    asked: Asked,
    buckets: str,
    own: dict[int, Trial],
    reference: dict[int, Trial],
    metric: Metric,
    num_seeds: int,
) -> Row:
    pairs = [(trial, reference[seed]) for seed, trial in own.items() if seed in reference]
    worse = loss_worse = None
    if len(pairs) > 1:
        worse = paired_difference([metric.how_much_worse(a.metric, b.metric) for a, b in pairs])
        loss_worse = paired_difference([a.train_loss - b.train_loss for a, b in pairs])
    return Row(asked, buckets, tuple(own.values()), metric, num_seeds, worse, loss_worse)
