"""Loss over time on a slow network: when each entry reaches the loss at which DDP ends."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from omegaconf import DictConfig

from lightning_dear.apps.recipe.report import Claim, Report, Rows, Sibling
from lightning_dear.studies.block import Floats


@dataclass(frozen=True)
class Run:
    """One training; all arrays have an element for each point of its curve.

    Attributes:
        steps: Number of steps made.
        times_s: Seconds since the first step began.
        sent_mb: 10^6 bytes that a rank has sent.
        losses: Running means of the training loss; nan at points before the window is full.
    """

    steps: Floats
    times_s: Floats
    sent_mb: Floats
    losses: Floats

    def reaches(self, target: float) -> int | None:
        """Return the index of the first point with at most the loss `target`; None if none has."""
        places = np.flatnonzero(self.losses <= target)
        return int(places[0]) if len(places) else None

    def per_step(self, figures: Floats) -> float:
        """Return the mean growth of `figures` in a step; nan if there is only one point."""
        num_steps = self.steps[-1] - self.steps[0]
        return float((figures[-1] - figures[0]) / num_steps) if num_steps else float("nan")


Runs = Mapping[str, Mapping[int, Run]]
"""Entry -> seed -> training."""


def make(cfg: DictConfig, siblings: Mapping[str, Sibling]) -> Report:
    """Compare when entries reach the reference's last loss, on each sibling's model.

    Raises:
        ValueError: If a sibling lacks the reference, or has trained it for too few steps.
    """
    summary: list[Mapping[str, Any]] = []
    panels: dict[str, tuple[Runs, float]] = {}
    for model, sibling in siblings.items():
        if runs := runs_of(sibling.rows("loss_over_time"), int(cfg.window_steps)):
            margin = float(sibling.rows()[0]["loss_margin"])
            targets = targets_of(model, runs, str(cfg.reference), margin)
            summary += [row_of(model, runs, one, str(cfg.reference), targets) for one in runs]
            panels[model] = runs, float(np.mean(list(targets.values())))
    claims = list(_claims(summary, str(cfg.reference), float(cfg.rate_mbit), list(siblings)))
    return Report(claims, summary, _picture(panels, str(cfg.reference)) if panels else None)


def runs_of(rows: Rows, window_steps: int) -> Runs:
    """Return the trainings of a `loss_over_time.csv`; losses become means over `window_steps`.

    Raises:
        ValueError: If the window is no multiple of the steps between two points.
    """
    found: dict[str, dict[int, list[Mapping[str, str]]]] = {}
    for row in rows:
        found.setdefault(row["entry"], {}).setdefault(int(row["seed"]), []).append(row)
    return {
        entry: {seed: _run(own, window_steps) for seed, own in seeds.items()}
        for entry, seeds in found.items()
    }


def _run(rows: Rows, window_steps: int) -> Run:
    names = ("step", "time_s", "sent_mb", "train_loss")
    steps, times_s, sent_mb, losses = (np.array([float(row[one]) for row in rows]) for one in names)
    # All points are equally many steps apart, so the first one's step number is that distance.
    width, rest = divmod(window_steps, int(steps[0]))
    if rest or width < 1:
        raise ValueError(
            f"window_steps={window_steps} must be a multiple of {steps[0]:.0f}, the steps of a"
            f" point. Set window_steps={steps[0]:.0f}, or twice that."
        )
    means = np.full_like(losses, np.nan)
    if len(losses) >= width:
        means[width - 1 :] = np.convolve(losses, np.full(width, 1 / width), "valid")
    return Run(steps, times_s, sent_mb, means)


def targets_of(model: str, runs: Runs, reference: str, margin: float) -> dict[int, float]:
    """Return seed -> loss to be reached: the reference's last loss plus the margin.

    Raises:
        ValueError: If the reference is missing, or has fewer steps than the window.
    """
    if reference not in runs:
        valid = ", ".join(runs)
        raise ValueError(f"{model} has no entry {reference!r}. Set reference to one of {valid}.")
    targets = {seed: float(run.losses[-1]) + margin for seed, run in runs[reference].items()}
    if not np.isfinite(list(targets.values())).all():
        raise ValueError(
            f"{reference} has made fewer than window_steps steps on {model}. Lower window_steps."
        )
    return targets


def row_of(
    model: str, runs: Runs, entry: str, reference: str, targets: Mapping[int, float]
) -> dict[str, Any]:
    """Return an entry's figures, as means over the seeds.

    Times to the target are None unless the entry reaches it on all seeds.
    """
    own, base = runs[entry], runs[reference]
    places = {seed: own[seed].reaches(to) for seed, to in targets.items() if seed in own}
    reached = [(own[seed], at) for seed, at in places.items() if at is not None]
    all_s = {seed: run.times_s[run.reaches(targets[seed])] for seed, run in base.items()}
    has_all = len(reached) == len(targets)
    ratios = [all_s[seed] / own[seed].times_s[places[seed]] for seed in targets if has_all]
    last, of_base = (np.mean([run.losses[-1] for run in of.values()]) for of in (own, base))
    return {
        "model": model,
        "entry": entry,
        "num_seeds": len(targets),
        "num_arrived": len(reached),
        "target_loss": float(np.mean(list(targets.values()))),
        "target_s": float(np.mean([run.times_s[at] for run, at in reached])) if has_all else None,
        "speedup": float(np.mean(ratios)) if has_all else None,
        "speedup_min": float(min(ratios)) if has_all else None,
        "speedup_max": float(max(ratios)) if has_all else None,
        "target_steps": float(np.mean([run.steps[at] for run, at in reached])) if has_all else None,
        "step_s": float(np.mean([run.per_step(run.times_s) for run in own.values()])),
        "sent_mb_per_step": float(np.mean([run.per_step(run.sent_mb) for run in own.values()])),
        "last_loss": float(last),
        "over_reference": float(last - of_base),
    }


def _claims(summary: Rows, reference: str, rate_mbit: float, models: list[str]) -> Iterator[Claim]:
    """Yield a claim for each entry: how many times as fast it reaches the loss, on each model."""
    for entry in dict.fromkeys(row["entry"] for row in summary if row["entry"] != reference):
        of_entry = {row["model"]: row for row in summary if row["entry"] == entry}
        parts = [f"{model} {_arrival(row)}" for model, row in of_entry.items()]
        what = f"{entry}: sooner at {reference}'s last loss"
        must = f"sending takes longer than computing, as on links of {rate_mbit:g} Mb/s"
        yield Claim(what, "ours", ", ".join(parts), "measured", must)
    for model in models:
        if model not in {row["model"] for row in summary}:
            yield Claim(f"{model}: sooner", "ours", "NOT RUN, measure=true does it", "measured")


def _arrival(row: Mapping[str, Any]) -> str:
    if row["speedup"] is None:
        return f"never on {row['num_seeds'] - row['num_arrived']} of {row['num_seeds']} seeds"
    return f"{row['speedup']:.2f}x"


def _picture(panels: Mapping[str, tuple[Runs, float]], reference: str) -> Any:
    from matplotlib.figure import Figure

    # Narrow, and with large letters: it is read on phones.
    figure = Figure(figsize=(6.4, 0.6 + 3.6 * len(panels)), layout="constrained")
    all_axes = figure.subplots(len(panels), squeeze=False)[:, 0]
    for axes, (model, (runs, target)) in zip(all_axes, panels.items(), strict=True):
        _draw(axes, model, runs, target, reference)
    figure.suptitle("Training loss over seconds, on links of 100 Mb/s", fontsize=12)
    return figure


def _draw(axes: Any, model: str, runs: Runs, target: float, reference: str) -> None:
    lasts = []
    for number, (entry, by_seed) in enumerate(runs.items()):
        # Up to the number of points that all seeds have.
        length = min(len(run.steps) for run in by_seed.values())
        times_s = np.mean([run.times_s[:length] for run in by_seed.values()], axis=0)
        losses = np.mean([run.losses[:length] for run in by_seed.values()], axis=0)
        (line,) = axes.plot(times_s, losses, label=entry, linewidth=1.6)
        # Neighbours stand at different heights.
        end, aside = (times_s[-1], losses[-1]), (3, 9 * (number % 3 - 1))
        look = {"color": line.get_color(), "va": "center", "fontsize": 9}
        axes.annotate(entry, end, aside, textcoords="offset points", **look)
        # The y axis leaves out early, high losses, which would flatten the curves near the target.
        lasts += [losses[-1], *([losses[length // 5]] if entry == reference else [])]
    bottom, top = np.nanmin([*lasts, target]), np.nanmax([*lasts, target])
    axes.set_ylim(bottom - 0.1 * (top - bottom), top + 0.1 * (top - bottom))
    axes.axhline(target, color="black", linewidth=0.8, linestyle="--", label="target")
    axes.set_title(f"{model}; dashed: the loss to reach", fontsize=11)
    axes.set_xlim(0, 1.15 * axes.get_xlim()[1])
    axes.grid(alpha=0.3)
