"""docs/support.md says what the rows say, and nothing else."""

from __future__ import annotations

import re

from tests.lightning.matrix.table import DIFFERENT, FEATURES, REFUSED, UNCAUGHT
from tests.lightning.matrix.write_support import BETWEEN_NAMES, PAGE, page

HEADINGS = {"feature", "what"}


def test_the_page_is_what_the_rows_make() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.lightning.matrix.write_support"


def test_every_row_is_named_and_every_name_is_a_row() -> None:
    cells = re.findall(r"^\| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    named = [name for cell in cells for name in cell.split(BETWEEN_NAMES)]
    rows = [*FEATURES, *REFUSED, *(one.name for one in (*DIFFERENT, *UNCAUGHT))]
    assert sorted(name for name in named if name not in HEADINGS) == sorted(rows)


def test_every_row_says_why() -> None:
    for row in FEATURES.values():
        assert all(one.reason and one.distance > 0 for one in row.apart), row.name
    for refused in REFUSED.values():
        assert refused.why, refused.name
        assert refused.instead, refused.name
