"""What `dear-bench` has measured of layer-wise and scheduled compression on emulated links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from lightning_dear.apps.recipe.report import Table
from lightning_dear.apps.recipe.sibling import Row
from lightning_dear.studies.files import rigs_of
from lightning_dear.studies.records import COMPUTE_ALONE

LAYERWISE, HEURISTIC, EXACT = "layerwise", "heuristic", "exact"
"""Entries: a bucket a tensor; MergeComp's own search; ours."""

_STARS = "* void, or of a void row: the machine was too busy in a round or more."


def measured_gains(rows: Sequence[Row]) -> dict[str, float]:
    """Return compressor -> how many times as fast as a bucket a tensor ours is.

    Args:
        rows: Of a `summary.csv`, of which a point is a compressor; without one of the two entries
            it counts for nothing, nor if one of them is void.
    """
    return {
        name: _gain(entries)
        for name, entries in _pairs(rows).items()
        if not _is_void(entries, LAYERWISE, EXACT)
    }


def measured_table(rows: Sequence[Row], name: str, compressors: Sequence[str], note: str) -> Table:
    """Return steps and scaling factors of those of `compressors` that were measured.

    Args:
        rows: Of a `summary.csv`; none: the table says so.
        name: Of what was measured.
        compressors: Whose rows are shown; none: all.
        note: Where it was measured.
    """
    cells = [
        [
            compressor,
            *(_milliseconds(entries, entry) for entry in (LAYERWISE, HEURISTIC, EXACT)),
            f"{_gain(entries):.2f}x{_star(entries, LAYERWISE, EXACT)}",
            _scaling(entries),
        ]
        for compressor, entries in _pairs(rows).items()
        if compressor in compressors or not compressors
    ]
    return Table(
        "measured",
        f"{name}, {_what(rows)}" if rows else f"{name}: NOT RUN, measure=true does it",
        [
            "compressor",
            "layer by layer, ms",
            "MergeComp's search, ms",
            "ours, ms",
            "ours over layer by layer",
            "scaling factor, %",
        ],
        cells,
        f"{_STARS} {note}" if rows else "",
    )


def said_of_measured(studies: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    """Yield what each of the studies has shown; void rows show nothing."""
    for name, rows in studies.items():
        pairs, gains = _pairs(rows), measured_gains(rows)
        if pairs:
            shown = _range(gains, len(pairs)) if gains else _nothing(pairs)
            yield f"Measured on emulated links (`{name}`): {shown}."


def _nothing(pairs: Mapping[str, Mapping[str, Row]]) -> str:
    is_always_void = all(_is_void(entries, LAYERWISE) for entries in pairs.values())
    what = "all rows of layer by layer are void" if is_always_void else "each pair has a void row"
    return f"no ratio of ours scheduled to layer by layer counts, {what}: the machine was busy"


def _range(gains: Mapping[str, float], num_pairs: int) -> str:
    low, high = min(gains, key=gains.__getitem__), max(gains, key=gains.__getitem__)
    num_void = num_pairs - len(gains)
    left_out = f"; {num_void} of {num_pairs} pairs are left out, as a row is void" * (num_void > 0)
    return (
        f"ours scheduled is {gains[low]:.1f} ({low}) to {gains[high]:.1f} times ({high}) as fast as"
        f" layer by layer{left_out}"
    )


def _pairs(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """Compressor -> its entries, where both that are compared are among them."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row["point"].rpartition("=")[2], {})[row["entry"]] = row
    return {name: entries for name, entries in found.items() if {LAYERWISE, EXACT} <= set(entries)}


def _gain(entries: Mapping[str, Row]) -> float:
    return float(entries[LAYERWISE]["ratio"]) / float(entries[EXACT]["ratio"])


def _is_void(entries: Mapping[str, Row], *names: str) -> bool:
    return any(entries[name]["is_void"] == "True" for name in names)


def _star(entries: Mapping[str, Row], *names: str) -> str:
    return "*" * _is_void(entries, *names)


def _what(rows: Sequence[Row]) -> str:
    one = rows[0]
    stands_for = float(one["stands_for_mbit"]) / 1e3
    ranks = rigs_of(rows) or f"{one['world_size']} ranks"
    return f"{one['model']}, {ranks}, stands for {stands_for:g} Gb/s"


def _milliseconds(entries: Mapping[str, Row], name: str) -> str:
    if name not in entries:
        return "-"
    return f"{1e3 * float(entries[name]['step_s']):.0f}{_star(entries, name)}"


def _scaling(entries: Mapping[str, Row]) -> str:
    """Ratios are of the same rounds, steps are not."""
    if COMPUTE_ALONE not in entries:
        return "-"
    alone = float(entries[COMPUTE_ALONE]["ratio"])
    before, after = (
        f"{100 * alone / float(entries[one]['ratio']):.0f}{_star(entries, COMPUTE_ALONE, one)}"
        for one in (LAYERWISE, EXACT)
    )
    return f"{before} -> {after}"
