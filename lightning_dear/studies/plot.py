"""Pictures of studies, all in one style: panels one below the other, one legend outside of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BLUE, ORANGE, RED, GREY = "#4c78a8", "#f58518", "#e45756", "#b8b8b8"

_STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 8,
    "savefig.dpi": 150,
}


@contextmanager
def picture(path: Path, num_bars: Sequence[int]) -> Iterator[Sequence[Any]]:
    """Yield axes to draw on; afterwards write the figure atomically to `path`.

    Args:
        path: Path of a PNG file.
        num_bars: Number of bars, from top to bottom, of each panel.
    """
    # Figure instead of pyplot, which only the main thread may use.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        heights = [1.0 + 0.3 * number for number in num_bars]
        figure = Figure(figsize=(9, sum(heights) + 0.5), layout="constrained")
        axes = list(figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0])
        yield axes
        for axis in axes:
            axis.invert_yaxis()
        found = [axis.get_legend_handles_labels() for axis in axes]
        named = {label: one for pair in found for one, label in zip(*pair, strict=True)}
        figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=3)
        part = path.with_name(f"{path.name}.part")
        figure.savefig(part, format="png")
    part.replace(path)
