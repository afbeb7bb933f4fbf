"""What a recipe ends with: sentences, tables whose figures say where they come from, a picture."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning_dear.studies.table import format_table

Kind = Literal["published", "simulated", "measured"]
"""Where a table's figures come from; columns of another kind say so in their titles."""

BEGIN, END = "<!-- dear-recipe writes from here -->", "<!-- to here -->"
"""What stands around the part of a recipe's README that a run replaces."""


@dataclass(frozen=True)
class Table:
    """Figures under their titles.

    Attributes:
        kind: Where they come from.
        title: What they are, in a line.
        titles: Of the columns; the first one is of words.
        rows: As many cells as titles.
        note: What to know for reading it.
    """

    kind: Kind
    title: str
    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    @property
    def heading(self) -> str:
        """Its title, behind where its figures come from."""
        return f"{self.kind.capitalize()}: {self.title}"

    def as_text(self) -> str:
        """Return it for a terminal."""
        lines = [self.heading, format_table([*self.titles, ""], [[*row, ""] for row in self.rows])]
        return "\n".join([*lines, self.note] if self.note else lines)

    def as_markdown(self) -> str:
        """Return it for a README."""
        head = [f"**{self.heading}**", ""]
        lines = [self.titles, ["---"] * len(self.titles), *self.rows]
        body = ["| " + " | ".join(cells) + " |" for cells in lines]
        return "\n".join([*head, *body, *(["", self.note] if self.note else [])])


@dataclass(frozen=True)
class Report:
    """All that a run of a recipe has to say.

    Attributes:
        summary: Sentences in plain words: what came out, beside what was claimed.
        tables: In the order of reading.
        figure: A `matplotlib.figure.Figure`; None for no picture.
        data: Name -> rows of figures, for a file `NAME.csv`; all rows have the same keys.
    """

    summary: Sequence[str]
    tables: Sequence[Table]
    figure: Any = None
    data: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)

    def as_text(self) -> str:
        """Return tables and sentences for a terminal; the sentences last, where one looks first."""
        return "\n\n".join([*(table.as_text() for table in self.tables), "\n".join(self.summary)])

    def as_markdown(self, picture: str) -> str:
        """Return the part of a README that is made by a run; `picture` is its file's name."""
        parts = ["\n".join(f"- {sentence}" for sentence in self.summary)]
        if self.figure is not None:
            parts.append(f"![{picture.removesuffix('.png')}]({picture})")
        return "\n\n".join([*parts, *(table.as_markdown() for table in self.tables)])


def write_report(report: Report, name: str, folder: Path, readme: str) -> None:
    """Write tables, picture, figures and README into `folder`.

    Args:
        report: What to write.
        name: The recipe's.
        folder: Where to.
        readme: The recipe's present README; what stands around the written part stays.

    Raises:
        ValueError: If the README has no place for it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    picture = f"{name}.png"
    written = with_section(readme, report.as_markdown(picture))
    (folder / "table.txt").write_text(report.as_text() + "\n")
    for title, rows in report.data.items():
        _write_csv(folder / f"{title}.csv", rows)
    if report.figure is not None:
        report.figure.savefig(folder / picture, dpi=130)
    (folder / "README.md").write_text(written)


def with_section(readme: str, section: str) -> str:
    """Return `readme` with `section` between its two marks.

    Raises:
        ValueError: If it has not both of them, in this order.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"The recipe's README.md lacks the lines {BEGIN} and {END}; restore them.")
    return f"{before}{BEGIN}\n\n{section}\n\n{END}{after}"


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
