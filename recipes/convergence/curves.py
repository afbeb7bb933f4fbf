"""When trainings reach a loss, by the curves that `dear-converge` has written."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import mean
from typing import Any

from lightning_dear.apps.recipe.sibling import Row

FILE = "loss_over_time.csv"
"""What `dear-converge` calls them."""


@dataclass(frozen=True)
class Run:
    """One training; all sequences have a place for each of its points.

    Attributes:
        steps: Steps made.
        times_s: Seconds since its first step began.
        sent_mb: 10^6 bytes that a rank has sent.
        losses: Running means of the training loss; nan where fewer steps were made.
    """

    steps: Sequence[int]
    times_s: Sequence[float]
    sent_mb: Sequence[float]
    losses: Sequence[float]

    def reaches(self, target: float) -> int | None:
        """Return the first place whose loss is at most `target`; None: there is none."""
        return next((at for at, loss in enumerate(self.losses) if loss <= target), None)

    def per_step(self, figures: Sequence[float]) -> float:
        """Return by how much `figures` grow in a step; nan for a single point."""
        num_steps = self.steps[-1] - self.steps[0]
        return (figures[-1] - figures[0]) / num_steps if num_steps else nan


@dataclass(frozen=True)
class Curves:
    """All trainings of one model.

    Attributes:
        model: Its name.
        runs: Entry -> seed -> training.
        reference: Entry that targets are taken from.
        margin: What its last loss may be exceeded by.
    """

    model: str
    runs: Mapping[str, Mapping[int, Run]]
    reference: str
    margin: float

    @property
    def targets(self) -> dict[int, float]:
        """Seed -> loss to be reached on it; nan where the reference has no last loss."""
        runs = self.runs[self.reference]
        return {seed: run.losses[-1] + self.margin for seed, run in runs.items()}

    @property
    def target(self) -> float:
        """Mean of the targets."""
        return mean(self.targets.values())

    def arrivals(self, entry: str) -> dict[int, int]:
        """Return, for each seed on which `entry` reaches the target, the place of that point."""
        found = {
            seed: self.runs[entry][seed].reaches(target)
            for seed, target in self.targets.items()
            if seed in self.runs[entry]
        }
        return {seed: at for seed, at in found.items() if at is not None}

    def speedups(self, entry: str) -> list[float]:
        """Return the reference's seconds over `entry`'s by seed; none if it stays away on one."""
        own, base = self.arrivals(entry), self.arrivals(self.reference)
        if own.keys() != self.targets.keys():
            return []
        runs, theirs = self.runs[entry], self.runs[self.reference]
        return [theirs[seed].times_s[base[seed]] / runs[seed].times_s[own[seed]] for seed in own]

    def as_row(self, entry: str) -> dict[str, Any]:
        """Return an entry's figures, means over the seeds; None for what it does not reach."""
        runs, arrivals, speedups = self.runs[entry], self.arrivals(entry), self.speedups(entry)
        reached = [(runs[seed], at) for seed, at in arrivals.items()] if speedups else []
        last = mean(run.losses[-1] for run in runs.values())
        return {
            "model": self.model,
            "entry": entry,
            "num_seeds": len(self.targets),
            "num_arrived": len(arrivals),
            "target_loss": self.target,
            "target_s": mean(run.times_s[at] for run, at in reached) if reached else None,
            "speedup": mean(speedups) if speedups else None,
            "speedup_min": min(speedups, default=None),
            "speedup_max": max(speedups, default=None),
            "target_steps": mean(run.steps[at] for run, at in reached) if reached else None,
            "step_s": mean(run.per_step(run.times_s) for run in runs.values()),
            "sent_mb_per_step": mean(run.per_step(run.sent_mb) for run in runs.values()),
            "last_loss": last,
            "over_reference": last - (self.target - self.margin),
        }


def read_runs(path: Path, window_steps: int) -> dict[str, dict[int, Run]]:
    """Return entry -> seed -> training; empty without a file.

    Args:
        path: A `loss_over_time.csv`, of one bucketing.
        window_steps: Steps of a running mean.

    Raises:
        ValueError: If the window is no multiple of the steps between two points.
    """
    if not path.is_file():
        return {}
    lines: dict[tuple[str, int], list[Row]] = {}
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            lines.setdefault((line["entry"], int(line["seed"])), []).append(line)
    found: dict[str, dict[int, Run]] = {}
    for (entry, seed), own in lines.items():
        found.setdefault(entry, {})[seed] = _run(own, window_steps)
    return found


def _run(lines: Sequence[Row], window_steps: int) -> Run:
    steps = [int(line["step"]) for line in lines]
    times_s, sent_mb, losses = (
        [float(line[name]) for line in lines] for name in ("time_s", "sent_mb", "train_loss")
    )
    # The first point is as many steps from the beginning as any other is from the one before.
    width, rest = divmod(window_steps, steps[0])
    if rest or width < 1:
        raise ValueError(
            f"window_steps={window_steps} must be a multiple of {steps[0]}, the steps of a point."
        )
    means = [mean(losses[max(end - width, 0) : end]) for end in range(1, len(losses) + 1)]
    num_short = min(width - 1, len(means))
    return Run(steps, times_s, sent_mb, [nan] * num_short + means[num_short:])
