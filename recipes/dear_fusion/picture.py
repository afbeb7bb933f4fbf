"""What tuners have found after each of their trials, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from lightning_dear.apps.recipe.dear_fusion_cases import Case


def traces(cases: Sequence[Case], tuners: Sequence[str]) -> Any:
    """Draw a row of panels for each cluster, in it one for each tuner, in it a line for each model.

    Along x is the trial's number, along y the shortest step until then over the best plan's.

    Returns:
        A `matplotlib.figure.Figure`; None without tuners.
    """
    if not tuners:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [(cluster, list(of)) for cluster, of in groupby(cases, key=lambda one: one.cluster)]
    figure = Figure(figsize=(9, 1.2 + 2.4 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(rows), len(tuners), squeeze=False, sharey="row", sharex="col")
    for (cluster, of), line in zip(rows, panels, strict=True):
        for axes, tuner in zip(line, tuners, strict=True):
            _draw(axes, of, tuner)
            axes.set_title(f"{tuner}, {cluster}", fontsize=10)
        line[0].set_ylabel("best so far / best plan", fontsize=8)
    for axes in panels[-1]:
        axes.set_xlabel("trial", fontsize=8)
    panels[0][0].legend(fontsize=7)
    figure.suptitle("What tuners have found after each trial, simulated", fontsize=11)
    return figure


def _draw(axes: Any, cases: Sequence[Case], tuner: str) -> None:
    for case in cases:
        ratios = [step_s / case.best_s for step_s in case.fused[tuner].best_so_far_s()]
        axes.step(range(1, len(ratios) + 1), ratios, where="post", marker=".", label=case.model)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
