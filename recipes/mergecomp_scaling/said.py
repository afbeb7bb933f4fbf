"""What a run of `mergecomp_scaling` has shown, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from lightning_dear.apps.recipe.mergecomp_cases import SLOW_TOPK, Cell
from lightning_dear.apps.recipe.mergecomp_fit import Fitted
from lightning_dear.apps.recipe.mergecomp_published import FP32, published
from lightning_dear.apps.recipe.mergecomp_schemes import (
    BEST_GROUPS,
    LAYERWISE,
    OURS_SCHEDULED,
    TWO_GROUPS,
)
from lightning_dear.apps.recipe.mergecomp_tables import (
    beside_figures,
    largest,
    our_gain,
    over_fp32,
    published_of,
    simulated_gain,
    unique,
)
from lightning_dear.apps.recipe.mergecomp_verdict import claimed_to_scale, verdict

LONGER = 1.005
"""Times as long: below that a step counts as no longer."""


def said(fit: Fitted | None, simulated: Sequence[Cell], varied: Sequence[Cell]) -> list[str]:
    """Return the sentences: first what is reproduced and what is not, then all the rest.

    Args:
        fit: The fitted network, if there is one.
        simulated: All of the recipe's.
        varied: Of one model with other starts of kernels; none: nothing is said of them.
    """
    most = max(one.world_size for one in simulated)
    of_most = [one for one in simulated if one.world_size == most]
    return [
        *verdict(fit, simulated, varied),
        *_of_fit(fit, simulated),
        *_distances(of_most),
        *_slow_topk(of_most),
        *_largest_gains(of_most),
        *_longer(simulated),
        *_over_fp32(of_most),
        *_groups(of_most),
        *_full_scaling(simulated),
        *_kernels(varied),
    ]


def _of_fit(fit: Fitted | None, simulated: Sequence[Cell]) -> Iterator[str]:
    """What was fitted, and how FP32 scales where nothing was."""
    if fit is None:
        return
    others = [
        f"{model}, which computes {1e3 * seconds:.0f} ms there (with the assumed seconds"
        f" {fit.assumed[model]:.0f} %, published {pair[0]:.0f} %)"
        for model, seconds in fit.seconds.items()
        if (pair := published(fit.cluster, fit.world_size, model, FP32))
    ]
    also = f" So does that of {' and of '.join(others)}." if others else ""
    yield (
        f"`{fit.name}` is `{fit.cluster}` at {1e9 * fit.beta_s:.2f} ns a byte"
        f" ({1e-9 / fit.beta_s:.2f} GB/s), where layer-wise FP32 of {fit.model} on"
        f" {fit.world_size} GPUs scales as published.{also} Nothing of compressors is fitted."
    )
    fewer = [
        f"{cell.scaling(LAYERWISE):.0f} % on {cell.world_size} GPUs (published {pair[0]:.0f})"
        for cell in simulated
        if (cell.network, cell.model, cell.compressor) == (fit.name, fit.model, FP32)
        and cell.world_size < fit.world_size
        and (pair := published_of(cell))
    ]
    if fewer:
        yield f"On fewer GPUs, where nothing is fitted, it scales by {' and '.join(fewer)}."


def _distances(cells: Sequence[Cell]) -> Iterator[str]:
    """How far simulated scaling factors are from published ones, where all compressors have one."""
    all_known = beside_figures(cells)
    for network in unique((one[0] for one in all_known), "network"):
        known = [one for one in all_known if one[0].network == network]
        before = [cell.scaling(LAYERWISE) - figure for cell, figure, _ in known]
        after = [cell.scaling(TWO_GROUPS) - figure for cell, _, figure in known]
        yield (
            f"Simulated with MergeComp's scheme, less published, on `{network}`: layer by layer"
            f" {fmean(before):+.0f} points on the average ({min(before):+.0f} to"
            f" {max(before):+.0f}), scheduled {fmean(after):+.0f} ({min(after):+.0f} to"
            f" {max(after):+.0f})."
        )


def _slow_topk(cells: Sequence[Cell]) -> Iterator[str]:
    parts = [
        f"{_before_after(cell, cell.model)} (published {pair[0]:.0f} -> {pair[1]:.0f})"
        for cell in cells
        if (cell.network, cell.compressor) == (cells[-1].network, SLOW_TOPK)
        and (pair := published_of(cell))
    ]
    if parts:
        yield (
            "Simulated with MergeComp's scheme, top-k with the `torch.topk` of those days"
            f" (`{SLOW_TOPK}`) on `{cells[-1].network}`: {', '.join(parts)}."
        )


def _largest_gains(cells: Sequence[Cell]) -> Iterator[str]:
    parts = []
    for network in unique(cells, "network"):
        own = [cell for cell in cells if cell.network == network]
        named = "{0.compressor} on {0.model}"
        found, ours = (largest(own, one, named) for one in (simulated_gain, our_gain))
        if found and ours:
            parts.append(
                f"`{network}` {found[0]:.1f}x ({found[1]}{_of_dgc(own)}; ours {ours[0]:.1f}x,"
                f" {ours[1]})"
            )
    if parts:
        yield (
            "Simulated with MergeComp's scheme, the largest ratios of scheduled to layer by layer:"
            f" {'; '.join(parts)}."
        )


def _longer(simulated: Sequence[Cell]) -> Iterator[str]:
    """Where merging costs more than it saves: groups wait for their last tensor."""
    parts = [
        _before_after(cell, f"{cell.compressor} on {cell.model}, {_where(cell)}")
        for cell in simulated
        if cell.compressor != FP32 and cell.gain(LAYERWISE, TWO_GROUPS) >= LONGER
    ]
    if parts:
        yield (
            "Simulated with MergeComp's scheme, two groups make a step longer than layer by layer,"
            f" so that the scaling factor falls: {'; '.join(parts)}."
        )


def _where(cell: Cell) -> str:
    return f"`{cell.network}`, {cell.world_size} GPUs"


def _before_after(cell: Cell, name: str) -> str:
    return f"{name} {cell.scaling(LAYERWISE):.0f} -> {cell.scaling(TWO_GROUPS):.0f} %"


def _over_fp32(cells: Sequence[Cell]) -> Iterator[str]:
    """Of the first model alone."""
    parts, model = [], cells[0].model
    for network in unique(cells, "network"):
        own = [cell for cell in cells if (cell.network, cell.model) == (network, model)]
        figure, theirs, ours = (largest(own, kind) for kind in over_fp32(own))
        if theirs is None or ours is None:
            continue
        beside = f"published {figure[0]:.1f}x ({figure[1]}), " if figure else ""
        parts.append(
            f"`{network}` {beside}their scheme, simulated, {theirs[0]:.1f}x ({theirs[1]}), ours"
            f" {ours[0]:.1f}x ({ours[1]})"
        )
    if parts:
        yield f"Scheduled over layer-wise FP32 of {model}, at most: {'; '.join(parts)}."


def _of_dgc(cells: Sequence[Cell]) -> str:
    found = [simulated_gain(cell) for cell in cells if cell.compressor == "dgc"]
    return f", dgc at most {max(found):.1f}x" if found else ""


def _groups(cells: Sequence[Cell]) -> Iterator[str]:
    """What is left to gain after two groups, and how ours compares with them."""
    for network in unique(cells, "network"):
        own = [
            one
            for one in cells
            if one.network == network and one.compressor not in (FP32, SLOW_TOPK)
        ]
        parts = [
            f"{what} {_percent(own, scheme)}"
            for what, scheme in (("the best groups", BEST_GROUPS), ("ours", OURS_SCHEDULED))
        ]
        if own:
            yield f"Over MergeComp's two groups on `{network}`: {', '.join(parts)}."


def _percent(cells: Sequence[Cell], scheme: str) -> str:
    least, most = (pick(cells, key=lambda one: one.gain(scheme, TWO_GROUPS)) for pick in (min, max))
    return " to ".join(
        f"{round(100 * (one.gain(scheme, TWO_GROUPS) - 1)):+d} % ({one.compressor} on {one.model})"
        for one in (least, most)
    )


def _full_scaling(simulated: Sequence[Cell]) -> Iterator[str]:
    """How FP16 scales where it is said to by 99 %."""
    parts = [
        f"{cell.model} on {cell.world_size} GPUs {cell.scaling(TWO_GROUPS):.1f} %"
        f" (ours {cell.scaling(OURS_SCHEDULED):.1f} %, FP32 without scheduling"
        f" {fp32.scaling(LAYERWISE):.1f} %, published {pair[0]:.0f})"
        for cell, fp32 in claimed_to_scale(simulated)
        if (pair := published_of(fp32))
    ]
    if parts:
        yield (
            "Simulated with MergeComp's scheme, FP16 scales as follows where 99 % is published:"
            f" {'; '.join(parts)}."
        )


def _kernels(cells: Sequence[Cell]) -> Iterator[str]:
    parts = []
    for kernel_s in unique(cells, "kernel_s"):
        own = [one for one in cells if one.kernel_s == kernel_s]
        found = largest(own, simulated_gain)
        if found is not None:
            parts.append(f"{1e6 * kernel_s:g} us {found[0]:.1f}x ({found[1]}{_of_dgc(own)})")
    if parts:
        yield (
            "The largest ratio hangs on what starting a kernel takes, which is an assumption:"
            f" {cells[0].model} on `{cells[0].network}` with {'; '.join(parts)}."
        )
