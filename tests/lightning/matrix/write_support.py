"""Writes docs/support.md from the rows: `python -m tests.lightning.matrix.write_support`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

from tests.lightning.matrix.rows import (
    SUM_ORDER,
    THREE_RANKS,
    Apart,
    Different,
    Feature,
    Refused,
    Uncaught,
)
from tests.lightning.matrix.table import DIFFERENT, FEATURES, REFUSED, UNCAUGHT

Row = TypeVar("Row", Feature, Refused)

BETWEEN_NAMES = "; "
PAGE = Path(__file__).resolve().parents[3] / "docs" / "support.md"
HEAD = f"""\
# What works under `strategy="dear"`

Search this page for what you use: a callback, a hook, a kind of layer. There are four answers:

- [Works](#works): the weights are those of `"ddp"`, in every step.
- [Refused](#refused): an error names the remedy.
- [Different from DDP](#different-from-ddp): it works, but not in the same way.
- [Cannot be caught](#cannot-be-caught): it may go wrong, and no error says so.

## Works

Tests train every row with SGD (momentum) and AdamW on 1, 2 and 3 ranks (gloo, CPU), and under
`"ddp"`. They compare weights, averaged weights (EMA), losses and learning rates in every step:

- On 1 and 2 ranks all bits are equal, unless a remark says *equal within* a relative distance.
  [Its number](#why-bits-differ) says why.
- On 3 ranks sums have another order: ours goes by rank, DDP's round a ring. The relative distance
  is at most {SUM_ORDER.distance:.0e} in float64, and {THREE_RANKS:.0e} under "Precision".

Checkpoints go between `"dear"` on 1, 2 or 3 ranks, `"ddp"` and one device, in mid-epoch, too. On as
many ranks as before, `"dear"` goes on bit for bit.
"""
REFUSED_HEAD = """\
## Refused

Every rank raises the same error: before training, where it can be known by then.
"""
FOOT = """\
This page is made by `python -m tests.lightning.matrix.write_support`.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, features in _sections(FEATURES.values()):
        rows = [(one.name, _remark(one)) for one in features]
        parts.append(f"### {title}\n\n" + _table(("feature", "remark"), _merged(rows)))
    parts.append("### Why bits differ\n")
    parts.append("".join(f"{n}. {reason}\n" for n, reason in enumerate(_reasons(), start=1)))
    parts.append(REFUSED_HEAD)
    for title, refused in _sections(REFUSED.values()):
        cells = [(one.name, one.why, one.instead) for one in refused]
        parts.append(f"### {title}\n\n" + _table(("what", "why", "instead"), _merged(cells)))
    parts.append("## Different from DDP\n\n" + _notes(DIFFERENT))
    parts.append("More of it: [how it works](how_it_works.md#what-is-different-from-ddp).\n")
    parts.append("## Cannot be caught\n\n" + _notes(UNCAUGHT))
    parts.append(FOOT)
    return "\n".join(parts)


def _merged(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """One row for all rows that say the same; those that say nothing stay apart."""
    merged: list[tuple[list[str], list[str]]] = []
    for name, *cells in rows:
        same = (names for names, said in merged if any(cells) and said == cells)
        found = next(same, None)
        if found is None:
            merged.append(([name], cells))
        else:
            found.append(name)
    return [(BETWEEN_NAMES.join(names), *cells) for names, cells in merged]


def _sections(rows: Iterable[Row]) -> Iterator[tuple[str, Iterable[Row]]]:
    return groupby(rows, key=attrgetter("section"))


def _reasons() -> list[str]:
    found = [one.reason for row in FEATURES.values() for one in _remarkable(row)]
    return list(dict.fromkeys(found))


def _remarkable(feature: Feature) -> list[Apart]:
    """Exceptions beyond those that the page's head explains."""
    return [one for one in feature.apart if one.world_sizes != SUM_ORDER.world_sizes]


def _remark(feature: Feature) -> str:
    parts = [feature.remark] if feature.remark else []
    for one in _remarkable(feature):
        where = "" if 1 in one.world_sizes else " on 2 ranks and more"
        what = f"{', '.join(one.series)} " if one.series else ""
        number = _reasons().index(one.reason) + 1
        parts.append(f"{what}equal within {one.distance:.0e}{where} ({number})")
    return "; ".join(parts)


def _notes(notes: Iterable[Different | Uncaught]) -> str:
    rows = [(one.name, one.what, one.instead) for one in notes]
    return _table(("what", "what happens", "instead"), rows)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    first, *others = ["| " + " | ".join(cells) + " |\n" for cells in (head, *rows)]
    return "".join([first, "|" + "---|" * len(head) + "\n", *others])


if __name__ == "__main__":
    PAGE.write_text(page())
