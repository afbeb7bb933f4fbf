"""Writes docs/support.md from the rows: `python -m tests.lightning.matrix.write_support`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from tests.lightning.matrix.rows import SUM_ORDER, THREE_RANKS, Apart, Different, Feature, Uncaught
from tests.lightning.matrix.table import DIFFERENT, FEATURES, REFUSED, UNCAUGHT

PAGE = Path(__file__).resolve().parents[3] / "docs" / "support.md"
HEAD = f"""\
# What works under `strategy="dear"`

Generated from the rows of the tests by `python -m tests.lightning.matrix.write_support`; a test
compares it with them.

Every feature below is trained with SGD (momentum) and with AdamW, on 1, 2 and 3 ranks (gloo, CPU),
under `"dear"` and under `"ddp"`. In every step the weights that a user's callback sees in
`on_train_batch_end`, averaged (EMA) weights, losses and learning rates are compared: **equal bit
for bit on 1 and 2 ranks**, if no remark says otherwise. On 3 ranks a sum depends on its order (ours
is by rank, DDP's goes round a ring): there the relative distance is at most
{SUM_ORDER.distance:.0e} in float64, {THREE_RANKS:.0e} in the precisions under "Precision". Under
`"dear"` all ranks hold the same bits after every step. Then the same is trained once more with
nobody reading weights. Parameters that are still being gathered read as NaN in all of this, so that
an early read cannot go unseen.

Checkpoints: `"dear"` on P ranks goes on as `"dear"` on Q ranks for P and Q in 1, 2, 3, as `"ddp"`
and on one device, and the other way round, in mid-epoch too; bit for bit where the number of ranks
is the same.
"""


def page() -> str:
    """The whole page."""
    plain = [one for one in FEATURES.values() if not _remark(one)]
    remarked = [one for one in FEATURES.values() if _remark(one)]
    parts = [HEAD, "## Works\n"]
    for title, features in _sections(plain):
        parts.append(f"### {title}\n\n" + "\n".join(f"- {one.name}" for one in features) + "\n")
    parts.append("## Works, with a remark\n")
    for title, features in _sections(remarked):
        rows = [(one.name, _remark(one)) for one in features]
        parts.append(f"### {title}\n\n" + _table(("feature", "remark"), rows))
    parts.append("Why not by the bit:\n")
    parts.append("".join(f"{n}. {reason}\n" for n, reason in enumerate(_reasons(), start=1)))
    parts.append(
        "## Refused\n\nOn every rank alike, before training starts where it can be known by then.\n"
    )
    for title, refused in _sections(REFUSED.values()):
        rows = [(one.name, one.why, one.instead) for one in refused]
        parts.append(f"### {title}\n\n" + _table(("what", "why", "instead"), rows))
    parts.append("## Different from DDP\n\n" + _notes(DIFFERENT))
    parts.append("## Cannot be caught\n\n" + _notes(UNCAUGHT))
    return "\n".join(parts)


def _sections(rows: Iterable[Feature]) -> Iterator[tuple[str, Iterable[Feature]]]:
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
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


if __name__ == "__main__":
    PAGE.write_text(page())
