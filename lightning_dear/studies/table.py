"""Tables of studies, as text for a terminal."""

from collections.abc import Sequence
from io import StringIO
from typing import Any

from rich.box import HORIZONTALS
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

MISSING = "-"
"""Text of a cell whose figure was not measured."""

WIDTH = 100
"""Most columns of a study's table, if its text can be wrapped so far."""

_ENDLESS = 10_000


def format_table(
    titles: Sequence[str], cells: Sequence[Sequence[str]], width: int | None = None
) -> str:
    """Return rows under their titles. The first and the last column are text, the others figures.

    Args:
        titles: Title of each column.
        cells: Rows, each as long as `titles`.
        width: Columns of the terminal. Titles and the last column are wrapped to fit; names and
            figures never are. None means as wide as needed.
    """
    table = Table(box=HORIZONTALS, padding=(0, 1, 0, 0), pad_edge=False)
    for number, title in enumerate(titles):
        is_last = number == len(titles) - 1
        narrow = max(map(len, (*title.split(), *(row[number] for row in cells))), default=0)
        justify: Any = "left" if is_last or number == 0 else "right"
        fixed = None if is_last or width is None else narrow
        table.add_column(title, justify=justify, width=fixed, no_wrap=width is None)
    for row in cells:
        table.add_row(*row)
    stream = StringIO()
    console = Console(file=stream, width=_ENDLESS, markup=False, highlight=False, emoji=False)
    least = Measurement.get(console, console.options, table).minimum
    # rich adds a column on both sides, which is removed below.
    console.print(table, width=None if width is None else max(width + 2, least))
    lines = stream.getvalue().replace("─", "-").splitlines()
    return "\n".join(line[1:].rstrip() for line in lines)


def shown(value: float | None, form: str, factor: float = 1.0) -> str:
    """Return `value * factor` in Python's format `form`; `MISSING` if the value is None."""
    return MISSING if value is None else format(value * factor, form)
