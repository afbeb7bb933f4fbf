"""How trainings end under each entry, against dense training: from trainings to verdicts.

A trial is one training, from fresh weights to the test: a line of raw.csv.

- key: of all options that have a say in it: the same key, the same numbers.
- entry, buckets: what was trained, and which tensors travelled together. phase: "tuning" or
  "final". seed: of weights, data order and dropout.
- lr_factor, lr: the learning rate over the one it is counted from, and the rate. dense_share: share
  of the steps in which nothing was encoded, at the beginning.
- metric: of the test, in the metric's unit; train_loss: mean over ranks and over the last steps;
  both are nan where training broke off.
- num_steps: optimizer steps that were made. weights, batches: digests of the weights before the
  first step, and of all training batches of rank 0, in order. train_s: seconds of the fit.

A point of a training's curve is a line of loss_over_time.csv; figures are means over its ranks.

- entry, buckets, seed: the training's. step: steps made.
- train_loss: mean of the steps since the point before, in six digits: two runs have fewer in
  common.
- time_s: seconds from the beginning of the first step to when this one's loss was known.
- sent_mb: what a rank sent meanwhile, 10^6 bytes, headers included; nan if unknown.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from lightning_dear.studies.files import OTHER_FOLDER, Line, append_lines, read_lines
from lightning_dear.studies.plot import BLUE, GREY, RED, picture
from lightning_dear.studies.report import show
from lightning_dear.studies.table import MISSING, WIDTH, format_table

LEVEL = 0.9
"""Share of repetitions in which the interval holds the true mean difference."""

WORDS = frozenset({"entry", "buckets", "reference", "metric", "unit", "verdict"})
"""Columns of summary.csv that are no figures, whatever stands in them."""

JUDGED = ("non-inferior", "NOT non-inferior")
"""Verdicts on entries that are neither references nor broken on purpose."""

BySeed = Mapping[int, Line]

_TRIAL_WORDS = ("key", "entry", "buckets", "phase", "weights", "batches")


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


def curve_of(trial: Line, steps: Sequence[Sequence[float]], every: int) -> list[Line]:
    """Return a point for `every` steps; what is left at the end has none.

    Args:
        trial: The training.
        steps: Of each step its loss, seconds and bytes since the first one's beginning.
        every: Steps of a point.
    """
    points = []
    for end in range(every, len(steps) + 1, every):
        loss = sum(loss for loss, _, _ in steps[end - every : end]) / every
        _, time_s, sent_bytes = steps[end - 1]
        points.append(
            {
                **{name: trial[name] for name in ("entry", "buckets", "seed")},
                "step": end,
                "train_loss": float(f"{loss:.6g}"),
                "time_s": round(time_s, 4),
                "sent_mb": round(sent_bytes / 1e6, 4),
            }
        )
    return points


def is_finite(trial: Line) -> bool:
    """Whether a training came to an end with numbers."""
    return math.isfinite(trial["metric"]) and math.isfinite(trial["train_loss"])


def best_of(trials: Sequence[Sequence[Line]], metric: Metric) -> int:
    """Return the place of the best options: each has a trial for every tuning seed.

    By the mean metric; where it is equal, as where it saturates, by the mean training loss. What
    broke off is behind all that did not.
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
    """Return key -> the training of that key, of all in raw.csv.

    Raises:
        ValueError: If raw.csv is of another program.
    """
    trials = read_lines(folder / "raw.csv", _TRIAL_WORDS)
    if trials and "key" not in trials[0]:
        raise ValueError(f"{folder / 'raw.csv'} is of another program: {OTHER_FOLDER}.")
    return {trial["key"]: trial for trial in trials}


def add_trial(folder: Path, trial: Line, curve: Sequence[Line]) -> None:
    """Append one training to raw.csv, and its curve to loss_over_time.csv, not those of the tuning.

    Raises:
        ValueError: If a file has other columns.
    """
    # The curve first: what stands in raw.csv is not trained again.
    if curve and trial["phase"] == "final":
        append_lines(folder / "loss_over_time.csv", curve)
    append_lines(folder / "raw.csv", [trial])


# --- rows ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked of an entry.

    Attributes:
        name: For people.
        reference: The dense entry it is compared with; None: it is one.
        is_control: Whether it is broken on purpose, and must be found out.
        below: What its training loss must end below, instead of being compared; None: compared.
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
        asked: In the order of the rows.
        trials: All that were measured; those of the tuning are left out.
        metric: How ends are judged.
        num_seeds: How many were asked for.
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
        **{f"worse_{end}": value for end, value in worse._asdict().items()},
        "margin": metric.margin,
        "train_loss": _mean(trials, "train_loss"),
        **{f"loss_worse_{end}": value for end, value in loss_worse._asdict().items()},
        "loss_margin": metric.loss_margin,
    }
    losses = [trial["train_loss"] for trial in trials]
    return {**row, "verdict": _verdict(asked, row, num_seeds, losses)}


def _verdict(asked: Asked, row: Line, num_seeds: int, losses: Sequence[float]) -> str:
    """Whether what was asked is so; how many seeds there are while some are missing."""
    if asked.reference is None:
        return "reference"
    if row["num_seeds"] < num_seeds:
        return f"{row['num_seeds']} of {num_seeds} seeds"
    if asked.below is not None:
        is_below = all(loss < asked.below for loss in losses)
        return f"{'' if is_below else 'NOT '}below {asked.below:g}"
    if row["worse_mean"] is None:
        return ""
    is_equal = row["worse_upper"] <= row["margin"]
    if not asked.is_control:
        return JUDGED[0] if is_equal else JUDGED[1]
    # Not by the width of its interval alone: it is worse, too.
    if not is_equal and row["worse_lower"] > 0:
        return "fails, as it must"
    is_noticed = row["loss_worse_upper"] > row["loss_margin"] and row["loss_worse_lower"] > 0
    return "fails by training loss, as it must" if is_noticed else "NOT NOTICED"


# --- what is written ------------------------------------------------------------------------------


def text_of(rows: Sequence[Line]) -> str:
    """Return all rows, at least one, and what they mean."""
    first, unit = rows[0], rows[0]["unit"]
    titles = [
        *("entry", "buckets", "lr", "x dense", "dense first", f"{first['metric']}, {unit} (sd)"),
        *("worse by [90 %]", "train loss", "higher by [90 %]", ""),
    ]
    table = format_table(titles, [_cells(row) for row in rows], WIDTH)
    return (
        f"{table}\n{first['num_seeds']} seeds; on each, all entries have the same weights and data"
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
    return [
        row["entry"],
        row["buckets"],
        f"{row['lr']:.3g}",
        f"{row['lr_factor']:.3g}",
        f"{row['dense_share']:.0%}",
        f"{row['mean']:.3f} ({row['sd']:.3f})",
        _interval(row, "worse"),
        f"{row['train_loss']:.4f}",
        _interval(row, "loss_worse"),
        "; ".join(filter(None, (row["verdict"], broken_off * (row["num_broken_off"] > 0)))),
    ]


def _interval(row: Line, name: str) -> str:
    mean, lower, upper = (row[f"{name}_{end}"] for end in ("mean", "lower", "upper"))
    if mean is None:
        return MISSING
    return f"{mean:+.3f} [{lower:+.3f}, {upper:+.3f}]" if math.isfinite(mean) else "inf"


def draw(path: Path, rows: Sequence[Line]) -> None:
    """Draw the paired differences with their intervals and the margin; nothing without pairs."""
    rows = [row for row in rows if row["worse_mean"] is not None]
    if not rows:
        return
    first, limit = rows[0], 4 * rows[0]["margin"]
    with picture(path, [len(rows)]) as (axis,):
        for number, row in enumerate(rows):
            _draw_row(axis, number, row, limit)
        axis.axvline(0, color="black", linewidth=0.8)
        axis.axvline(first["margin"], color=RED, linestyle="--", label="margin")
        axis.set_xlim(-limit, limit)
        axis.set_yticks(range(len(rows)), [f"{row['entry']}, {row['buckets']}" for row in rows])
        axis.set_xlabel(f"{first['metric']}: worse than dense by ({first['unit']}), 90 % interval")


def show_again(folder: Path) -> None:
    """Prints a folder's table, and writes it and the picture again; see `report.show`."""
    show(folder, WORDS, text_of, draw)


def _draw_row(axis: Any, number: int, row: Line, limit: float) -> None:
    mean, lower, upper = (row[f"worse_{end}"] for end in ("mean", "lower", "upper"))
    if lower > limit:
        value = f"{mean:.3g}" if math.isfinite(mean) else "broke off"
        axis.text(limit, number, f"{value} >", ha="right", va="center")
        return
    is_judged = row["verdict"] in JUDGED
    color, label = (BLUE, "judged") if is_judged else (GREY, "controls and others")
    axis.plot([lower, upper], [number, number], color=color, label=label)
    axis.plot([mean], [number], marker="o", markersize=3, color=color)


# --- how sure that is ----------------------------------------------------------------------------


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
    from scipy import stats

    if len(worse_by) < 2:
        return Difference()
    if not all(math.isfinite(one) for one in worse_by):
        return Difference(math.inf, math.inf, math.inf)
    center = mean(worse_by)
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(worse_by) - 1) * stats.sem(worse_by))
    return Difference(center, center - half, center + half)
