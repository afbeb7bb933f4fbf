"""Compares how trainings end under each entry with dense training: from trainings to verdicts.

A trial is one training, from fresh weights to the test. It is a line of raw.csv with these columns:

- key: digest of all options on which the result depends. Trials with the same key are the same.
- entry, buckets: names of the entry and of its bucketing. phase: "tuning" or "final". seed: seed of
  weights, data order and dropout.
- lr_factor, lr: the learning rate divided by the reference's, and the rate itself. dense_share:
  share of the steps, at the beginning, in which nothing was encoded.
- metric: the test metric in its unit. train_loss: mean over ranks and over the last steps. Both are
  nan if the training broke off because gradients were no longer finite.
- num_steps: number of optimizer steps that were made. weights, batches: digests of the weights
  before the first step, and of rank 0's training batches in order. train_s: seconds of the fit
  from its first step on.

A point of a training's curve is a line of loss_over_time.csv. Its figures are means over ranks.

- entry, buckets, seed: same as the trial's. step: number of steps made.
- train_loss: mean over the steps since the last point, with six digits; repeated runs differ in
  later ones.
- time_s: seconds from the beginning of the first step to when this step's loss was computed.
- sent_mb: 10^6 bytes that a rank has sent since then, headers included; nan if unknown.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from lightning_dear.studies import plot, report, table
from lightning_dear.studies.files import OTHER_FOLDER, Line, append_lines, read_lines

LEVEL = 0.9
"""Confidence level of the intervals."""

WORDS = frozenset({"entry", "buckets", "reference", "metric", "unit", "verdict"})
"""Columns of summary.csv that are text, even if a cell looks like a number."""

JUDGED = ("non-inferior", "NOT non-inferior")
"""Verdicts on entries that are neither references nor controls (broken on purpose)."""

BySeed = Mapping[int, Line]

_TRIAL_WORDS = ("key", "entry", "buckets", "phase", "weights", "batches")


@dataclass
class Metric:
    """How the end of a training is judged: the key `metric` of `dear-converge`.

    Attributes:
        name: Name of the test metric that the model logs.
        unit: Unit of the metric in the table.
        scale: Factor from the logged value to that unit.
        is_higher_better: Whether a higher value is better.
        margin: Most by which an entry may be worse than its reference, in `unit`.
        loss_margin: Most by which its training loss may be higher.
    """

    name: str
    unit: str
    scale: float
    is_higher_better: bool
    margin: float
    loss_margin: float

    def value_in(self, metrics: Mapping[str, float] | None) -> float:
        """Return the metric in `unit`; nan if `metrics` is None, which means a broken-off training.

        Raises:
            ValueError: If the model logs no test metric of this name.
        """
        if metrics is None:
            return math.nan
        if self.name not in metrics:
            raise ValueError(
                f"The test gave no {self.name!r}. Set metric.name to one of the metrics that it"
                f" gave: {', '.join(metrics)}."
            )
        return self.scale * metrics[self.name]

    def how_much_worse(self, value: float, reference: float) -> float:
        """Return by how much `value` is worse than `reference`, in `unit`; negative if better."""
        return reference - value if self.is_higher_better else value - reference


def curve_of(trial: Line, steps: Sequence[Sequence[float]], every: int) -> list[Line]:
    """Return a point of the curve for every `every` steps. Steps left over at the end have none.

    Args:
        trial: The training.
        steps: For each step its loss, and seconds and bytes since the beginning of the first step.
        every: Number of steps of a point.
    """
    points, own = [], {name: trial[name] for name in ("entry", "buckets", "seed")}
    for end in range(every, len(steps) + 1, every):
        loss = sum(loss for loss, _, _ in steps[end - every : end]) / every
        _, time_s, sent_bytes = steps[end - 1]
        point = {**own, "step": end, "train_loss": float(f"{loss:.6g}")}
        points.append({**point, "time_s": round(time_s, 4), "sent_mb": round(sent_bytes / 1e6, 4)})
    return points


def is_finite(trial: Line) -> bool:
    """Whether a training ended with a finite metric and a finite training loss."""
    return math.isfinite(trial["metric"]) and math.isfinite(trial["train_loss"])


def best_of(trials: Sequence[Sequence[Line]], metric: Metric) -> int:
    """Return the index in `trials` of the best options.

    The best options have the best mean metric. If that is equal, for example because it saturates,
    they have the lowest mean training loss. Options with a broken-off trial come last.

    Args:
        trials: For each of the options, a trial on every tuning seed.
        metric: How ends are judged.
    """

    def rank(place: int) -> tuple[float, float]:
        tried = trials[place]
        if not all(map(is_finite, tried)):
            return (math.inf, math.inf)
        return (metric.how_much_worse(_mean(tried, "metric"), 0.0), _mean(tried, "train_loss"))

    return min(range(len(trials)), key=rank)


def _mean(trials: Sequence[Line], name: str) -> float:
    return float(np.mean([trial[name] for trial in trials]))


# --- the trainings of a folder --------------------------------------------------------------------


def read_trials(folder: Path) -> dict[str, Line]:
    """Return key -> training, of all trainings in a folder's raw.csv.

    Raises:
        ValueError: If another program wrote raw.csv.
    """
    trials = read_lines(folder / "raw.csv", _TRIAL_WORDS)
    if trials and "key" not in trials[0]:
        raise ValueError(f"{folder / 'raw.csv'} is of another program. {OTHER_FOLDER}")
    return {trial["key"]: trial for trial in trials}


def add_trial(folder: Path, trial: Line, curve: Sequence[Line]) -> None:
    """Append one training to raw.csv, and its curve to loss_over_time.csv if its phase is "final".

    Raises:
        ValueError: If a file has other columns.
    """
    # The curve first: a training in raw.csv is not repeated, so a kill could lose its curve.
    if curve and trial["phase"] == "final":
        append_lines(folder / "loss_over_time.csv", curve)
    append_lines(folder / "raw.csv", [trial])


# --- rows ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Asked:
    """An entry, and how its end is judged.

    Attributes:
        name: Name in the table.
        reference: Dense entry with which it is compared. None means that it is itself a reference.
        is_control: Whether it is broken on purpose, so that the comparison must notice it.
        below: Bound below which its training loss must end, instead of a comparison. None means a
            comparison with the reference.
    """

    name: str
    reference: str | None = None
    is_control: bool = False
    below: float | None = None


def summarize(
    asked: Sequence[Asked], trials: Sequence[Line], metric: Metric, num_seeds: int
) -> list[Line]:
    """Return a row for each entry and bucketing that has been trained on a seed.

    Args:
        asked: Entries in the order of the rows.
        trials: All trainings; those of the tuning are left out here.
        metric: How ends are judged.
        num_seeds: Number of seeds of the whole study.
    """
    final: dict[tuple[str, str], dict[int, Line]] = {}
    for trial in trials:
        if trial["phase"] == "final":
            final.setdefault((trial["entry"], trial["buckets"]), {})[trial["seed"]] = trial
    return [
        _row(one, own, final.get((one.reference or "", buckets), {}), metric, num_seeds)
        for one in asked
        for (entry, buckets), own in final.items()
        if entry == one.name
    ]


def _row(asked: Asked, own: BySeed, reference: BySeed, metric: Metric, num_seeds: int) -> Line:
    trials = list(own.values())
    pairs = [(trial, reference[seed]) for seed, trial in own.items() if seed in reference]
    worse = paired_difference([metric.how_much_worse(a["metric"], b["metric"]) for a, b in pairs])
    loss_worse = paired_difference([a["train_loss"] - b["train_loss"] for a, b in pairs])
    ends = [trial["metric"] for trial in trials]
    row: Line = {
        "entry": asked.name,
        "buckets": trials[0]["buckets"],
        "reference": asked.reference,
        **{name: trials[0][name] for name in ("lr", "lr_factor", "dense_share")},
        "num_seeds": len(trials),
        "num_broken_off": sum(not is_finite(trial) for trial in trials),
        "metric": metric.name,
        "unit": metric.unit,
        "mean": _mean(trials, "metric"),
        "sd": float(np.std(ends, ddof=1)) if len(ends) > 1 else math.nan,
        "median": float(np.median(ends)),
        **{f"worse_{end}": value for end, value in worse._asdict().items()},
        "margin": metric.margin,
        "train_loss": _mean(trials, "train_loss"),
        **{f"loss_worse_{end}": value for end, value in loss_worse._asdict().items()},
        "loss_margin": metric.loss_margin,
    }
    return {**row, "verdict": _verdict(asked, row, num_seeds, trials)}


def _verdict(asked: Asked, row: Line, num_seeds: int, trials: Sequence[Line]) -> str:
    """Return the verdict on an entry; while seeds are missing, their number so far."""
    if asked.reference is None:
        return "reference"
    if row["num_seeds"] < num_seeds:
        return f"{row['num_seeds']} of {num_seeds} seeds"
    if asked.below is not None:
        is_below = all(trial["train_loss"] < asked.below for trial in trials)
        return f"{'' if is_below else 'NOT '}below {asked.below:g}"
    if row["worse_mean"] is None:
        return ""
    is_equal = row["worse_upper"] <= row["margin"]
    if not asked.is_control:
        return JUDGED[0] if is_equal else JUDGED[1]
    # A wide interval alone does not count as a noticed control: its lower end must be above 0.
    if not is_equal and row["worse_lower"] > 0:
        return "fails, as it must"
    is_noticed = row["loss_worse_upper"] > row["loss_margin"] and row["loss_worse_lower"] > 0
    return "fails by training loss, as it must" if is_noticed else "NOT NOTICED"


# --- output ---------------------------------------------------------------------------------------


def text_of(rows: Sequence[Line]) -> str:
    """Return the table of all rows, at least one, and a legend."""
    first, unit = rows[0], rows[0]["unit"]
    ends = f"{first['metric']}, {unit} (sd)", "worse by [90 %]", "train loss", "higher by [90 %]"
    titles = "entry", "buckets", "lr", "x dense", "dense first", *ends, ""
    shown = table.format_table(titles, [_cells(row) for row in rows], table.WIDTH)
    return (
        f"{shown}\n{first['num_seeds']} seeds; on each, all entries have the same weights and data"
        " order.\n"
        "x dense: learning rate over the reference's (a reference's: over the config's); it and\n"
        "steps that go dense first were chosen on other seeds. worse by: mean paired difference to"
        " the\nreference with its two-sided 90 % interval, mean +- t(0.95, n - 1) sd / sqrt(n).\n"
        f"non-inferior: the upper end is at most {first['margin']:g} {unit}. What is broken on"
        " purpose fails: the\nupper end is above that, or that of the training loss above"
        f" {first['loss_margin']:g}, and the lower end above 0."
    )


def _cells(row: Line) -> list[str]:
    broken_off = f"{row['num_broken_off']} of {row['num_seeds']} broke off"
    options = f"{row['lr']:.3g}", f"{row['lr_factor']:.3g}", f"{row['dense_share']:.0%}"
    end = f"{row['mean']:.3f} ({row['sd']:.3f})", _interval(row, "worse")
    loss = f"{row['train_loss']:.4f}", _interval(row, "loss_worse")
    said = filter(None, (row["verdict"], broken_off * (row["num_broken_off"] > 0)))
    return [row["entry"], row["buckets"], *options, *end, *loss, "; ".join(said)]


def _interval(row: Line, name: str) -> str:
    mean, lower, upper = (row[f"{name}_{end}"] for end in ("mean", "lower", "upper"))
    if mean is None:
        return table.MISSING
    return f"{mean:+.3f} [{lower:+.3f}, {upper:+.3f}]" if math.isfinite(mean) else "inf"


def draw(path: Path, rows: Sequence[Line]) -> None:
    """Draw the paired differences with their intervals and the margin; nothing without pairs."""
    if not (rows := [row for row in rows if row["worse_mean"] is not None]):
        return
    first, limit = rows[0], 4 * rows[0]["margin"]
    with plot.picture(path, [len(rows)]) as (axis,):
        for number, row in enumerate(rows):
            _draw_row(axis, number, row, limit)
        axis.axvline(0, color="black", linewidth=0.8)
        axis.axvline(first["margin"], color=plot.RED, linestyle="--", label="margin")
        axis.set_xlim(-limit, limit)
        axis.set_yticks(range(len(rows)), [f"{row['entry']}, {row['buckets']}" for row in rows])
        axis.set_xlabel(f"{first['metric']}: worse than dense by ({first['unit']}), 90 % interval")


def show_again(folder: Path) -> None:
    """Print the table of a folder, and write it and the picture again; see `report.show`."""
    report.show(folder, WORDS, text_of, draw)


def _draw_row(axis: Any, number: int, row: Line, limit: float) -> None:
    mean, lower, upper = (row[f"worse_{end}"] for end in ("mean", "lower", "upper"))
    if lower > limit:
        value = f"{mean:.3g}" if math.isfinite(mean) else "broke off"
        axis.text(limit, number, f"{value} >", ha="right", va="center")
        return
    is_judged = row["verdict"] in JUDGED
    color, label = (plot.BLUE, "judged") if is_judged else (plot.GREY, "controls and others")
    axis.plot([lower, upper], [number, number], color=color, label=label)
    axis.plot([mean], [number], marker="o", markersize=3, color=color)


# --- how sure that is ----------------------------------------------------------------------------


class Difference(NamedTuple):
    """Mean difference of pairs, with its interval. Positive means worse; None means too few pairs.

    Attributes:
        mean: Mean of the differences.
        lower: Lower end of the interval.
        upper: Upper end of the interval, which is compared with a margin.
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
        worse_by: Difference on each seed, at least 2 for an interval. If a difference is not
            finite, all three results are inf.
    """
    from scipy import stats

    if len(worse_by) < 2:
        return Difference()
    if not all(math.isfinite(one) for one in worse_by):
        return Difference(math.inf, math.inf, math.inf)
    center = mean(worse_by)
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(worse_by) - 1) * stats.sem(worse_by))
    return Difference(center, center - half, center + half)
