"""Local steps: how many times DDP's steps each setting takes to the loss with which it ends."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from omegaconf import DictConfig

from lightning_dear.apps.recipe.report import Claim, Report, Rows, Sibling, grouped_bars

Run = tuple[str, str, int]
"""A training: name of its model, name of its setting, number of its steps."""

REFERENCE = "ddp"
"""Setting with which others are compared."""


def make(cfg: DictConfig, siblings: Mapping[str, Sibling]) -> Report:
    """Compare each setting with the reference's trainings of several lengths.

    Siblings are named MODEL_RATE, and their entries "SETTING STEPS". Each setting has the rate with
    which it ends best.
    """
    rows = best_rows(siblings)
    summary = [row_of(rows, run) for run in rows]
    return Report(list(_claims(cfg, summary)), summary, _picture(summary))


def best_rows(siblings: Mapping[str, Sibling]) -> dict[Run, Mapping[str, str]]:
    """Return the row of the best learning rate for each training."""
    best: dict[Run, Mapping[str, str]] = {}
    for name, sibling in siblings.items():
        for row in sibling.rows():
            setting, steps = row["entry"].split()
            run = name.partition("_")[0], setting, int(steps)
            if run not in best or loss_of(row) < loss_of(best[run]):
                best[run] = row
    return best


def loss_of(row: Mapping[str, str]) -> float:
    """Return the median over seeds of a row's test loss, or of its error if it has an accuracy.

    Not the mean: a seed of some settings ends on a higher plateau.
    """
    median = float(row["median"])
    return 100 - median if row["unit"] == "points" else median


def steps_of_reference(rows: Mapping[Run, Mapping[str, str]], model: str, loss: float) -> float:
    """Return how many steps the reference needs to end with `loss`; nan if it always ends better.

    Between its trainings the loss is linear in the logarithm of steps. With a loss below that of
    the longest training, the result is the number of steps of the longest one.
    """
    own = {run[2]: row for run, row in rows.items() if run[:2] == (model, REFERENCE)}
    curve = sorted((steps, loss_of(row)) for steps, row in own.items())
    steps, losses = np.array(curve, dtype=float).reshape(-1, 2).T
    if not len(losses) or loss > losses[0]:
        return float("nan")
    return float(np.exp(np.interp(-loss, -np.minimum.accumulate(losses), np.log(steps))))


def row_of(rows: Mapping[Run, Mapping[str, str]], run: Run) -> dict[str, Any]:
    """Return the figures of a training. `times_steps` is None if the reference always ends better.

    `over_reference` is the loss minus the reference's after as many steps; None if it has none.
    """
    model, setting, steps = run
    row, other = rows[run], rows.get((model, REFERENCE, steps))
    loss = loss_of(row)
    times = steps / steps_of_reference(rows, model, loss)
    return {
        **{"model": model, "setting": setting, "steps": steps, "lr": float(row["lr"])},
        **{"num_seeds": int(row["num_seeds"]), "loss": loss, "sd": float(row["sd"])},
        "over_reference": loss - loss_of(other) if other else None,
        "times_steps": times if np.isfinite(times) else None,
    }


def _claims(cfg: DictConfig, summary: Rows) -> Iterator[Claim]:
    """Yield a claim for each list of trainings in the config: what differs, and the ratios."""
    times = _times_of(summary)
    for what, one in cfg.claims.items():
        runs = [(one.model, *word.split()) for word in one.runs]
        said = [_ratio(times, (model, setting, int(steps))) for model, setting, steps in runs]
        yield Claim(what, "ours", ", ".join(said), "measured")


def _times_of(summary: Rows) -> dict[Run, float | None]:
    return {(row["model"], row["setting"], row["steps"]): row["times_steps"] for row in summary}


def _ratio(times: Mapping[Run, float | None], run: Run) -> str:
    if run not in times:
        return "NOT RUN"
    ratio = times[run]
    return "far more" if ratio is None else f"{ratio:.2f}x"


def _picture(summary: Rows) -> Any:
    """Draw the ratios of each model: a group for each setting, a bar for each number of steps."""
    heights = {
        (model, f"{steps} steps", setting): times
        for (model, setting, steps), times in _times_of(summary).items()
        if setting != REFERENCE
    }
    what = "Steps to the same loss, over DDP's"
    return grouped_bars(heights, "steps over DDP's", what, 1) if heights else None
