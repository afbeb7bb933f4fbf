"""What is known of a training that has ended, and what is asked of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """How the end of a training is judged.

    Attributes:
        name: Of the test metric that the model logs.
        unit: Of what stands in the table.
        scale: What the model's number is multiplied by to be in that unit.
        is_higher_better: Whether more is better.
        margin: Most that another training may be worse, in that unit.
        loss_margin: Most that its training loss may be higher.
    """

    name: str
    unit: str
    scale: float
    is_higher_better: bool
    margin: float
    loss_margin: float

    def value_in(self, metrics: Mapping[str, float] | None) -> float:
        """Return the metric in `unit`; nan for None, where a training broke off.

        Raises:
            ValueError: If the model logs none of that name.
        """
        if metrics is None:
            return math.nan
        if self.name not in metrics:
            raise ValueError(
                f"The test gave no {self.name!r}; valid values of metric.name:"
                f" {', '.join(metrics)}."
            )
        return self.scale * metrics[self.name]

    def how_much_worse(self, value: float, reference: float) -> float:
        """Return by how much `value` is worse than `reference`, in `unit`; below 0: better."""
        return reference - value if self.is_higher_better else value - reference


@dataclass(frozen=True)
class Trial:
    """One training, from fresh weights to the test.

    Attributes:
        key: Of all options that have a say in it: the same key, the same numbers.
        entry: What was trained.
        buckets: Which tensors travelled together.
        phase: "tuning" or "final".
        seed: Of weights, data order and dropout.
        lr_factor: The learning rate over the one it is counted from.
        lr: The learning rate.
        dense_share: Share of the steps in which nothing was encoded, at the beginning.
        metric: Of the test, in the metric's unit; nan where training broke off.
        train_loss: Mean over ranks and over the last steps; nan where training broke off.
        num_steps: Optimizer steps that were made.
        weights: Digest of the weights before the first step.
        batches: Digest of all training batches of rank 0, in order.
        train_s: Seconds of the fit.
    """

    key: str
    entry: str
    buckets: str
    phase: str
    seed: int
    lr_factor: float
    lr: float
    dense_share: float
    metric: float
    train_loss: float
    num_steps: int
    weights: str
    batches: str
    train_s: float

    @property
    def is_finite(self) -> bool:
        """Whether it came to an end with numbers."""
        return math.isfinite(self.metric) and math.isfinite(self.train_loss)


@dataclass(frozen=True)
class CurvePoint:
    """Where a training is after some steps; figures are means over its ranks.

    Attributes:
        step: Steps made.
        train_loss: Mean of the steps since the point before.
        time_s: Seconds from the beginning of the first step to when this one's loss was known.
        sent_mb: What a rank sent meanwhile, 10^6 bytes, headers included; nan if unknown.
    """

    step: int
    train_loss: float
    time_s: float
    sent_mb: float


Curve = Sequence[CurvePoint]
"""In order of the steps."""


def curve_of(steps: Sequence[Sequence[float]], every: int) -> Curve:
    """Return a point for `every` steps; what is left at the end has none.

    Args:
        steps: Of each step its loss, seconds and bytes since the first one's beginning.
        every: Steps of a point.
    """
    points = []
    for end in range(every, len(steps) + 1, every):
        losses = [loss for loss, _, _ in steps[end - every : end]]
        _, time_s, sent_bytes = steps[end - 1]
        point = CurvePoint(end, sum(losses) / every, round(time_s, 4), round(sent_bytes / 1e6, 4))
        points.append(point)
    return points


def best_of(trials: Sequence[Sequence[Trial]], metric: Metric) -> int:
    """Return the place of the best options: each has a trial for every tuning seed.

    By the mean metric; where it is equal, as where it saturates, by the mean training loss. What
    broke off is behind all that did not.
    """

    def rank(place: int) -> tuple[float, float]:
        tried = trials[place]
        if not all(trial.is_finite for trial in tried):
            return (math.inf, math.inf)
        mean = sum(trial.metric for trial in tried) / len(tried)
        loss = sum(trial.train_loss for trial in tried) / len(tried)
        return (metric.how_much_worse(mean, 0.0), loss)

    return min(range(len(trials)), key=rank)
