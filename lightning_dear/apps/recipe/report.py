"""Report of a recipe: claims with the assumptions under which they hold, figures, a picture.

Also reads the measured figures of a recipe's siblings.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from math import isclose
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.table import Table

from lightning_dear.studies.files import read_rows

Kind = Literal["simulated", "measured"]

Answer = Literal["yes", "no", "not known"]

Rows = Sequence[Mapping[str, Any]]

WIDTH = 100
"""Most columns of a recipe's output."""

RELATIVE_TOLERANCE = 1e-6
"""Relative difference up to which a figure counts as equal to the recorded one."""

PLAUSIBLE = 1.5
"""A fitted value is plausible if an independent value is within this factor of it."""

Heights = Mapping[tuple[str, str, str], float | None]
"""Names of a panel, a series and a group -> height of the bar. None means no bar."""

_MOST_DIFFERENCES = 10


@dataclass(frozen=True)
class Claim:
    """One published claim, and the result of this run. All attributes are text for people.

    Attributes:
        claim: The claim in a few words.
        published: The published figure, with its unit.
        here: The figure of this run, with its unit.
        kind: Whether `here` was simulated or measured.
        must_be_true: Assumption under which the claim holds, with its fitted value. Empty if the
            claim holds without one.
        checked: Independent value with which the fitted one was compared, and the result. "none"
            means that there is no such value.
        plausible: "yes" if the independent value is within a factor of `PLAUSIBLE`, "no" if not,
            "not known" if there is none.
    """

    claim: str
    published: str
    here: str
    kind: Kind
    must_be_true: str = ""
    checked: str = "none"
    plausible: Answer = "not known"


def check(what: str, fitted: float, other: float) -> dict[str, Any]:
    """Return the attributes `checked` and `plausible` of a claim.

    Args:
        what: The independent value in words, with its unit.
        fitted: Value with which the claim holds; positive.
        other: Independent value from another source; positive.
    """
    words = f"{what}, {max(fitted / other, other / fitted):.2f}x off"
    return {"checked": words, "plausible": is_plausible(fitted, other)}


def is_plausible(fitted: float, other: float) -> Answer:
    """Return whether two positive values are within a factor of `PLAUSIBLE` of each other."""
    return "yes" if max(fitted / other, other / fitted) <= PLAUSIBLE else "no"


@dataclass(frozen=True)
class Report:
    """Result of a run of a recipe.

    Attributes:
        claims: Claims in the order in which they are printed.
        summary: Rows of figures in SI units; all rows have the same keys. They are compared with
            the recorded rows, cell by cell.
        figure: A `matplotlib.figure.Figure`. None means no picture.
    """

    claims: Sequence[Claim]
    summary: Rows
    figure: Any = None

    def as_text(self) -> str:
        """Return the claims for a terminal, at most `WIDTH` columns wide."""
        table = Table(show_lines=True, expand=True)
        for title in ("claimed", "here", "must be true", "checked"):
            table.add_column(title, ratio=1, overflow="fold")
        for one in self.claims:
            claimed, here = f"{one.claim}: {one.published}", f"{one.kind}: {one.here}"
            checked = f"{one.checked} (plausible: {one.plausible})"
            table.add_row(claimed, here, one.must_be_true or "nothing more", checked)
        text = StringIO()
        Console(file=text, width=WIDTH, color_system=None).print(table)
        return text.getvalue().rstrip()

    def write(self, name: str, folder: Path) -> None:
        """Write `claims.csv`, `summary.csv` and `NAME.png` into `folder`; overwrites old files."""
        folder.mkdir(parents=True, exist_ok=True)
        _write_csv(folder / "claims.csv", [asdict(one) for one in self.claims])
        _write_csv(folder / "summary.csv", self.summary)
        if self.figure is not None:
            self.figure.savefig(folder / f"{name}.png", dpi=130)


class Sibling(NamedTuple):
    """A small measurement beside a simulated claim.

    Attributes:
        folder: Folder of its measured files. It does not exist if it was never measured.
    """

    folder: Path

    def rows(self, name: str = "summary") -> list[dict[str, str]]:
        """Return the rows of its file `NAME.csv`; an empty list if it was not measured."""
        return read_rows(self.folder / f"{name}.csv")


def compared(summary: Rows, recorded: Rows) -> str:
    """Return a sentence that figures equal the recorded ones, or the cells that differ."""
    if not (found := list(_differences(summary, recorded))):
        return "Same as recorded."
    more = [f"... and {len(found) - _MOST_DIFFERENCES} more"][: len(found) > _MOST_DIFFERENCES]
    lines = [f"Differs from what is recorded in {len(found)} places:", *found[:_MOST_DIFFERENCES]]
    return "\n  ".join([*lines, *more])


def _differences(summary: Rows, recorded: Rows) -> Iterator[str]:
    if len(summary) != len(recorded):
        yield f"{len(summary)} rows, recorded {len(recorded)}"
        return
    for number, (row, old) in enumerate(zip(summary, recorded, strict=True), 1):
        for key in dict.fromkeys([*row, *old]):
            new, was = "" if row.get(key) is None else str(row[key]), old.get(key, "")
            if not _is_same(new, was):
                yield f"row {number}, {key}: {new}, recorded {was}"


def _is_same(one: str, other: str) -> bool:
    try:
        return isclose(float(one), float(other), rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-12)
    except ValueError:
        return one == other


def _write_csv(path: Path, rows: Rows) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


# --- pictures -------------------------------------------------------------------------------------


def grouped_bars(heights: Heights, ylabel: str, title: str, line: float | None) -> Any:
    """Draw bars in panels, one below the other. All have the same series and groups.

    Args:
        heights: Heights of the bars. Panels, series and groups are in the order in which they come.
        ylabel: Quantity on the y axis.
        title: Title of the figure.
        line: Height of a horizontal line, such as 1 for no gain. None means no line.

    Returns:
        A `matplotlib.figure.Figure`.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    panels, series, groups = (list(dict.fromkeys(part)) for part in zip(*heights, strict=True))
    figure = Figure(figsize=(9, 1 + 2.6 * len(panels)), layout="constrained")
    all_axes = figure.subplots(len(panels), squeeze=False, sharex=True)[:, 0]
    width = 0.85 / len(series)
    for axes, panel in zip(all_axes, panels, strict=True):
        for number, name in enumerate(series):
            places = {at + (number + 0.5) * width - 0.425: one for at, one in enumerate(groups)}
            bars = {at: heights.get((panel, name, group)) for at, group in places.items()}
            drawn = {at: height for at, height in bars.items() if height}
            color = colormaps["tab20"](number % 20)
            axes.bar(list(drawn), list(drawn.values()), width, label=name, color=color)
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
