"""How trainings end under each entry, against dense training: from trainings to verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_dear.studies.files import append_lines, read_records
from lightning_dear.studies.plot import BLUE, GREY, RED, picture
from lightning_dear.studies.statistics import Difference, paired_difference
from lightning_dear.studies.table import MISSING, WIDTH, format_table


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
    """One training, from fresh weights to the test: a line of raw.csv.

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
    """Where a training is after some steps, a line of curves.csv; figures are means over its ranks.

    Attributes:
        key: The training's.
        step: Steps made.
        train_loss: Mean of the steps since the point before.
        time_s: Seconds from the beginning of the first step to when this one's loss was known.
        sent_mb: What a rank sent meanwhile, 10^6 bytes, headers included; nan if unknown.
    """

    key: str
    step: int
    train_loss: float
    time_s: float
    sent_mb: float


def curve_of(key: str, steps: Sequence[Sequence[float]], every: int) -> list[CurvePoint]:
    """Return a point for `every` steps; what is left at the end has none.

    Args:
        key: The training's.
        steps: Of each step its loss, seconds and bytes since the first one's beginning.
        every: Steps of a point.
    """
    points = []
    for end in range(every, len(steps) + 1, every):
        loss = sum(loss for loss, _, _ in steps[end - every : end]) / every
        _, time_s, sent_bytes = steps[end - 1]
        points.append(CurvePoint(key, end, loss, round(time_s, 4), round(sent_bytes / 1e6, 4)))
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
        mean = float(np.mean([trial.metric for trial in tried]))
        return (metric.how_much_worse(mean, 0.0), float(np.mean([one.train_loss for one in tried])))

    return min(range(len(trials)), key=rank)


# --- the trainings of a folder --------------------------------------------------------------------


def read_curves(folder: Path) -> dict[str, list[CurvePoint]]:
    """Return a training's key -> its curve, of all in curves.csv.

    Raises:
        ValueError: If it has other columns.
    """
    found: dict[str, list[CurvePoint]] = {}
    for point in read_records(folder / "curves.csv", CurvePoint):
        found.setdefault(point.key, []).append(point)
    return found


def read_trials(folder: Path) -> dict[str, Trial]:
    """Return key -> the training of that key, of all in raw.csv.

    Raises:
        ValueError: If raw.csv or curves.csv has other columns: what is trained is added to both.
    """
    read_curves(folder)
    return {trial.key: trial for trial in read_records(folder / "raw.csv", Trial)}


def add_trial(folder: Path, trial: Trial, curve: Sequence[CurvePoint]) -> None:
    """Append one training to raw.csv, and its loss over its steps to curves.csv."""
    # The curve first: what stands in raw.csv is not trained again.
    if curve:
        append_lines(folder / "curves.csv", [asdict(point) for point in curve])
    append_lines(folder / "raw.csv", [asdict(trial)])


# --- rows ---------------------------------------------------------------------------------------


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
    rows = []
    for one in asked:
        for (entry, buckets), own in final.items():
            if entry == one.entry:
                reference = final.get((one.reference or "", buckets), {})
                worse = _differences(own, reference, metric)
                rows.append(Row(one, buckets, tuple(own.values()), metric, num_seeds, *worse))
    return rows


def _differences(
    own: Mapping[int, Trial], reference: Mapping[int, Trial], metric: Metric
) -> tuple[Difference | None, Difference | None]:
    """Of the metric and of the training loss."""
    pairs = [(trial, reference[seed]) for seed, trial in own.items() if seed in reference]
    if len(pairs) < 2:
        return None, None
    worse = paired_difference([metric.how_much_worse(a.metric, b.metric) for a, b in pairs])
    return worse, paired_difference([a.train_loss - b.train_loss for a, b in pairs])


# --- what is written ------------------------------------------------------------------------------


def summary_line(row: Row) -> dict[str, Any]:
    """Return one row's line of summary.csv."""
    first = row.trials[0]
    return {
        "entry": row.asked.entry,
        "buckets": row.buckets,
        "reference": row.asked.reference,
        "lr": first.lr,
        "lr_factor": first.lr_factor,
        "dense_share": first.dense_share,
        "num_seeds": len(row.trials),
        "num_broken_off": row.num_broken_off,
        "metric": row.metric.name,
        "unit": row.metric.unit,
        "mean": row.metric_mean,
        "sd": row.metric_sd,
        **_flat("worse", row.worse),
        "margin": row.metric.margin,
        "train_loss": row.loss_mean,
        **_flat("loss_worse", row.loss_worse),
        "loss_margin": row.metric.loss_margin,
        "verdict": row.verdict,
    }


def _flat(name: str, difference: Difference | None) -> dict[str, float | None]:
    ends = asdict(difference) if difference else dict.fromkeys(("mean", "lower", "upper"))
    return {f"{name}_{end}": value for end, value in ends.items()}


def curve_lines(
    rows: Sequence[Row], curves: Mapping[str, Sequence[CurvePoint]]
) -> list[dict[str, Any]]:
    """Return lines of loss_over_time.csv: the losses of all rows' trainings over their steps.

    Args:
        rows: Say which trainings, by entry, buckets and seed; the tuning's are left out.
        curves: A training's key -> its curve; there are no lines of those without.
    """
    lines = []
    for row in rows:
        for trial in row.trials:
            for point in curves.get(trial.key, ()):
                own = {"entry": row.asked.entry, "buckets": row.buckets, "seed": trial.seed}
                # More digits than two runs have in common.
                line = {**own, **asdict(point), "train_loss": float(f"{point.train_loss:.6g}")}
                del line["key"]
                lines.append(line)
    return lines


def text_of(rows: Sequence[Row]) -> str:
    """Return all rows, at least one, and what they mean."""
    metric = rows[0].metric
    titles = [
        *("entry", "buckets", "lr", "x dense", "dense first", f"{metric.name}, {metric.unit} (sd)"),
        *("worse by [90 %]", "train loss", "higher by [90 %]", ""),
    ]
    table = format_table(titles, [_cells(row) for row in rows], WIDTH)
    seeds = ", ".join(str(trial.seed) for trial in rows[0].trials)
    return (
        f"{table}\nSeeds {seeds}; on each, all entries have the same weights and data order.\n"
        "x dense: learning rate over the reference's (a reference's: over the config's); it and\n"
        "steps that go dense first were chosen on other seeds. worse by: mean paired difference to"
        " the\nreference with its two-sided 90 % interval, mean +- t(0.95, n - 1) sd / sqrt(n).\n"
        f"non-inferior: the upper end is at most {metric.margin:g} {metric.unit}. What is broken on"
        " purpose fails: the\nupper end is above that, or that of the training loss above"
        f" {metric.loss_margin:g}, and the lower end above 0."
    )


def _cells(row: Row) -> list[str]:
    first = row.trials[0]
    broken_off = f"{row.num_broken_off} of {len(row.trials)} broke off" * (row.num_broken_off > 0)
    return [
        row.asked.entry,
        row.buckets,
        f"{first.lr:.3g}",
        f"{first.lr_factor:.3g}",
        f"{first.dense_share:.0%}",
        f"{row.metric_mean:.3f} ({row.metric_sd:.3f})",
        _interval(row.worse),
        f"{row.loss_mean:.4f}",
        _interval(row.loss_worse),
        "; ".join(text for text in (row.verdict, broken_off) if text),
    ]


def _interval(one: Difference | None) -> str:
    if one is None:
        return MISSING
    if not math.isfinite(one.mean):
        return "inf"
    return f"{one.mean:+.3f} [{one.lower:+.3f}, {one.upper:+.3f}]"


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Draw the paired differences with their intervals and the margin; nothing without pairs."""
    rows = [row for row in rows if row.worse is not None and row.asked.reference is not None]
    if not rows:
        return
    metric = rows[0].metric
    limit = 4 * metric.margin
    with picture(path, [len(rows)]) as (axis,):
        for number, row in enumerate(rows):
            _draw_row(axis, number, row, limit)
        axis.axvline(0, color="black", linewidth=0.8)
        axis.axvline(metric.margin, color=RED, linestyle="--", label="margin")
        axis.set_xlim(-limit, limit)
        axis.set_yticks(range(len(rows)), [f"{row.asked.entry}, {row.buckets}" for row in rows])
        axis.set_xlabel(f"{metric.name}: worse than dense by ({metric.unit}), 90 % interval")


def _draw_row(axis: Any, number: int, row: Row, limit: float) -> None:
    assert row.worse is not None
    if row.worse.lower > limit:
        value = f"{row.worse.mean:.3g}" if math.isfinite(row.worse.mean) else "broke off"
        axis.text(limit, number, f"{value} >", ha="right", va="center")
        return
    is_judged = not row.asked.is_control and row.asked.below is None
    color, label = (BLUE, "judged") if is_judged else (GREY, "controls and others")
    axis.plot([row.worse.lower, row.worse.upper], [number, number], color=color, label=label)
    axis.plot([row.worse.mean], [number], marker="o", markersize=3, color=color)
