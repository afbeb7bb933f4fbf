"""Pictures of recipes: bars side by side, one panel for each cluster."""

from collections.abc import Mapping, Sequence
from typing import Any

Bars = Mapping[str, Sequence[float | None]]
"""Series -> a height for each group. None means no bar."""


def grouped_bars(
    panels: Mapping[str, Bars], groups: Sequence[str], ylabel: str, title: str, line: float | None
) -> Any:
    """Draw bars; a panel for each cluster, one below the other.

    Args:
        panels: Title of a panel -> its bars.
        groups: Names of the groups along the x axis.
        ylabel: Quantity on the y axis.
        title: Title of the figure.
        line: Height of a horizontal line, such as 1 for no gain. None means no line.

    Returns:
        A `matplotlib.figure.Figure`.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1 + 2.6 * len(panels)), layout="constrained")
    all_axes = figure.subplots(len(panels), squeeze=False, sharex=True)[:, 0]
    for axes, (panel, bars) in zip(all_axes, panels.items(), strict=True):
        width = 0.85 / max(len(bars), 1)
        for number, (name, heights) in enumerate(bars.items()):
            places = [group + (number + 0.5) * width - 0.425 for group in range(len(groups))]
            drawn = [(at, height) for at, height in zip(places, heights, strict=True) if height]
            axes.bar(
                [at for at, _ in drawn],
                [height for _, height in drawn],
                width,
                label=name,
                color=colormaps["tab20"](number % 20),
            )
        axes.margins(y=0.25)
        axes.grid(axis="y", alpha=0.3)
        axes.set_title(panel, fontsize=10)
        axes.set_ylabel(ylabel, fontsize=8)
        axes.set_xticks(range(len(groups)), groups, fontsize=8)
        if line is not None:
            axes.axhline(line, color="black", linewidth=0.8)
    all_axes[0].legend(fontsize=7, ncols=5, loc="upper left")
    figure.suptitle(title, fontsize=11)
    return figure
