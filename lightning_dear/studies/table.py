"""Tables of studies, as text for a terminal."""

from collections.abc import Sequence
from io import StringIO

from rich.box import HORIZONTALS
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

MISSING = "-"
"""What stands for a figure that was not measured."""

WIDTH = 100
"""Columns of a terminal that a study's table keeps to where its words can be broken."""

_ENDLESS = 10_000


def format_table(
    titles: Sequence[str], cells: Sequence[Sequence[str]], width: int | None = None
) -> str:
    """Return rows under their titles: the first and the last column are words, figures between.

    Args:
        titles: One for each column.
        cells: Rows, each as long as `titles`.
        width: Columns of the terminal; titles and the last column are broken to fit, and never a
            name or a figure. None: as wide as needed.
    """
    table = Table(box=HORIZONTALS, padding=(0, 1, 0, 0), pad_edge=False)
    for number, title in enumerate(titles):
        is_last = number == len(titles) - 1
        entries = [row[number] for row in cells]
        narrow = max(map(len, (*title.split(), *entries)), default=0)
        table.add_column(
            title,
            justify="left" if is_last or number == 0 else "right",
            width=None if is_last or width is None else narrow,
            no_wrap=width is None,
        )
    for row in cells:
        table.add_row(*row)
    stream = StringIO()
    console = Console(file=stream, width=_ENDLESS, markup=False, highlight=False, emoji=False)
    least = Measurement.get(console, console.options, table).minimum
    # What rich adds on both sides is cut off again.
    console.print(table, width=None if width is None else max(width + 2, least))
    lines = stream.getvalue().replace("─", "-").splitlines()
    return "\n".join(line[1:].rstrip() for line in lines)


def shown(value: float | None, form: str, factor: float = 1.0) -> str:
    """Return a figure times `factor` in Python's format `form`; `MISSING` for None."""
    return MISSING if value is None else format(value * factor, form)
