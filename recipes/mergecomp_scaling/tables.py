"""Tables of MergeComp's figures beside simulated ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lightning_dear.apps.recipe.mergecomp_cases import SLOW_TOPK, Cell
from lightning_dear.apps.recipe.mergecomp_fit import Fitted
from lightning_dear.apps.recipe.mergecomp_published import FP32, Pair, published
from lightning_dear.apps.recipe.mergecomp_schemes import (
    BEST_GROUPS,
    LAYERWISE,
    OURS_LAYERWISE,
    OURS_SCHEDULED,
    TWO_GROUPS,
)
from lightning_dear.apps.recipe.report import Table

PUBLISHED_NOTE = "Published: digitised from the authors' scaling-factor figures, each +-1."

THEIRS = "their scheme, simulated"
"""Title of columns of MergeComp's scheme in its two groups."""

Gain = Callable[[Cell], float | None]
"""How many times as fast something of a cell is; None where it is not known."""

Largest = tuple[float, str]
"""A gain, and of what."""


def published_of(cell: Cell) -> Pair | None:
    """Return what the figures show for it; see `published`."""
    return published(cell.figures_of, cell.world_size, cell.model, cell.compressor)


def unique(cells: Iterable[Cell], attribute: str) -> list[Any]:
    """Return what an attribute of `cells` is, once each, as they come."""
    return list(dict.fromkeys(getattr(cell, attribute) for cell in cells))


def beside_figures(cells: Sequence[Cell]) -> list[tuple[Cell, float, float]]:
    """Return compressors with their figures, layer by layer and scheduled.

    Only of networks of which more than one compressor has figures; `SLOW_TOPK` has those of topk.
    """
    known = [
        (cell, pair[0], pair[1])
        for cell in cells
        if cell.compressor != SLOW_TOPK
        and (pair := published_of(cell)) is not None
        and pair[1] is not None
    ]
    pairs = {(cell.network, cell.compressor) for cell, _, _ in known}
    num = Counter(network for network, _ in pairs)
    return [one for one in known if num[one[0].network] > 1]


def largest(cells: Iterable[Cell], gain: Gain, named: str = "{0.compressor}") -> Largest | None:
    """Return the largest gain of compressors; None if none is known.

    Args:
        cells: Among which to look.
        gain: What of a cell to compare.
        named: What to call a cell; a format for `str.format`.
    """
    gains = [(gain(cell), cell) for cell in cells if cell.compressor != FP32]
    found = [(value, cell) for value, cell in gains if value is not None]
    if not found:
        return None
    value, cell = max(found, key=lambda one: one[0])
    return value, named.format(cell)


def published_gain(cell: Cell) -> float | None:
    """Return scheduled over layer by layer as the figures show; None without a figure."""
    pair = published_of(cell)
    return None if pair is None or pair[1] is None else pair[1] / pair[0]


def simulated_gain(cell: Cell) -> float:
    """Return two groups over layer by layer, of MergeComp's scheme."""
    return cell.gain(TWO_GROUPS, LAYERWISE)


def our_gain(cell: Cell) -> float:
    """Return ours scheduled over ours layer by layer."""
    return cell.gain(OURS_SCHEDULED, OURS_LAYERWISE)


def of_network(cells: Sequence[Cell], network: str) -> Table:
    """Return all models and compressors on a network, of as many GPUs as `cells` have."""
    rows = [
        [
            cell.model,
            cell.compressor,
            _pair(published_of(cell)),
            _simulated_pair(cell, LAYERWISE, TWO_GROUPS),
            f"{cell.scaling(BEST_GROUPS):.0f}",
            _simulated_pair(cell, OURS_LAYERWISE, OURS_SCHEDULED),
        ]
        for cell in cells
        if cell.network == network
    ]
    return Table(
        "simulated",
        f"{network}, {cells[0].world_size} GPUs: scaling factor in %, layer by layer -> scheduled",
        ["model", "compressor", "published", THEIRS, "its best groups", "ours"],
        rows,
        f"{PUBLISHED_NOTE} fp32 is scheduled by merging alone, which has no published figure.",
    )


def gains(cells: Sequence[Cell]) -> Table:
    """Return the largest gains of scheduling, and of compressors scheduled over FP32."""
    rows = []
    for network in unique(cells, "network"):
        for model in unique(cells, "model"):
            own = [one for one in cells if (one.network, one.model) == (network, model)]
            kinds = [published_gain, simulated_gain, our_gain, *over_fp32(own)]
            rows.append([network, model, *(_times(largest(own, kind)) for kind in kinds)])
    names = ["published", THEIRS, "ours"]
    return Table(
        "simulated",
        "the largest ratio, scheduled over layer by layer; and scheduled over FP32 layer by layer",
        ["network", "model", *names, *(f"{name} / FP32" for name in names)],
        rows,
        "FP32 is an all-reduce for each tensor. " + PUBLISHED_NOTE,
    )


def over_fp32(cells: Sequence[Cell]) -> list[Gain]:
    """Return what scheduled compressors gain over FP32, of a model: published, simulated, ours."""
    plain = next(cell for cell in cells if cell.compressor == FP32)
    figure = published_of(plain)

    def in_figures(cell: Cell) -> float | None:
        pair = published_of(cell)
        if pair is None or figure is None or pair[1] is None:
            return None
        return pair[1] / figure[0]

    def ratio(scheme: str) -> Gain:
        return lambda cell: cell.scaling(scheme) / plain.scaling(LAYERWISE)

    return [in_figures, ratio(TWO_GROUPS), ratio(OURS_SCHEDULED)]


def by_world_size(cells: Sequence[Cell], title: str) -> Table:
    """Return a row for each network, model and compressor, and columns for numbers of GPUs."""
    keys = dict.fromkeys((one.network, one.model, one.compressor) for one in cells)
    sizes = sorted(set(unique(cells, "world_size")))
    found = {(one.network, one.model, one.compressor, one.world_size): one for one in cells}
    rows = [
        [*key, *(text for size in sizes for text in _sized(found.get((*key, size))))]
        for key in keys
    ]
    names = [f"{name}, {size}" for size in sizes for name in ("published", THEIRS, "ours")]
    titles = ["network", "model", "compressor", *names]
    return Table("simulated", title, titles, rows, PUBLISHED_NOTE)


def _sized(cell: Cell | None) -> list[str]:
    if cell is None:
        return ["-"] * 3
    return [
        _pair(published_of(cell)),
        _simulated_pair(cell, LAYERWISE, TWO_GROUPS),
        _simulated_pair(cell, OURS_LAYERWISE, OURS_SCHEDULED),
    ]


def fits(fit: Fitted, seconds: dict[str, float]) -> Table:
    """Return what FP32's figures say of a network, and of what GPUs compute."""
    rows = [
        [
            model,
            _fp32(published(fit.cluster, fit.world_size, model, FP32)),
            f"{1e3 * own_s:.0f} ms",
            f"{fit.assumed[model]:.0f} %",
            f"{1e3 * fit.seconds.get(model, own_s):.0f} ms",
        ]
        for model, own_s in seconds.items()
    ]
    return Table(
        "simulated",
        f"{fit.name}: FP32 at {1e9 * fit.beta_s:.2f} ns a byte ({1e-9 / fit.beta_s:.2f} GB/s)",
        ["model", "published", "assumed to compute", "scales then", "computes here"],
        rows,
        PUBLISHED_NOTE,
    )


def kernels(cells: Sequence[Cell]) -> Table:
    """Return how scheduling gains with other assumptions of what a kernel's start takes."""
    compressors = unique(cells, "compressor")
    rows = [
        [
            f"{1e6 * kernel_s:g} us",
            *(_simulated_pair(one, LAYERWISE, TWO_GROUPS) for one in own),
            _times(largest(own, simulated_gain)),
        ]
        for kernel_s in unique(cells, "kernel_s")
        for own in [[one for one in cells if one.kernel_s == kernel_s]]
    ]
    return Table(
        "simulated",
        f"{cells[0].model} on {cells[0].network} in their scheme, if starting a kernel takes",
        ["kernel", *compressors, "largest ratio"],
        rows,
    )


def _pair(pair: Pair | None) -> str:
    if pair is None:
        return "-"
    return f"{pair[0]:.0f}" + ("" if pair[1] is None else f" -> {pair[1]:.0f}")


def _fp32(pair: Pair | None) -> str:
    return "-" if pair is None else f"{pair[0]:.0f} %"


def _simulated_pair(cell: Cell, before: str, after: str) -> str:
    return _pair((cell.scaling(before), cell.scaling(after)))


def _times(found: Largest | None) -> str:
    return "-" if found is None else f"{found[0]:.1f}x ({found[1]})"
