"""What a run of `mergecomp_scaling` has shown, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from lightning_dear.apps.recipes.mergecomp_cases import SLOW_TOPK, Cell
from lightning_dear.apps.recipes.mergecomp_fit import Fitted
from lightning_dear.apps.recipes.mergecomp_published import (
    FP32,
    LARGEST_GAIN,
    LARGEST_SCALING,
)
from lightning_dear.apps.recipes.mergecomp_said_of_fit import said_of_fit
from lightning_dear.apps.recipes.mergecomp_schemes import (
    BEST_GROUPS,
    LAYERWISE,
    OURS_SCHEDULED,
    TWO_GROUPS,
)
from lightning_dear.apps.recipes.mergecomp_tables import (
    largest,
    our_gain,
    over_fp32,
    published_of,
    simulated_gain,
    unique,
)


def said(fit: Fitted | None, simulated: Sequence[Cell], varied: Sequence[Cell]) -> list[str]:
    """Return the sentences.

    Args:
        fit: The fitted network, if there is one.
        simulated: All of the recipe's.
        varied: Of one model with other starts of kernels; none: nothing is said of them.
    """
    most = max(one.world_size for one in simulated)
    of_most = [one for one in simulated if one.world_size == most]
    return [
        *said_of_fit(fit, simulated),
        *_distances(of_most),
        *_slow_topk(of_most),
        *_reached(of_most),
        *_over_fp32(of_most),
        *_groups(of_most),
        *_full_scaling(simulated),
        *_kernels(varied),
    ]


def _distances(cells: Sequence[Cell]) -> Iterator[str]:
    """How far simulated scaling factors are from published ones, where all compressors have one."""
    for network in unique(cells, "network"):
        known = [
            (cell, pair[0], pair[1])
            for cell in cells
            if cell.network == network
            and cell.compressor != SLOW_TOPK
            and (pair := published_of(cell))
            and pair[1] is not None
        ]
        if len(unique((cell for cell, _, _ in known), "compressor")) < 2:
            continue
        before = [cell.scaling(LAYERWISE) - figure for cell, figure, _ in known]
        after = [cell.scaling(TWO_GROUPS) - figure for cell, _, figure in known]
        yield (
            f"MergeComp's scheme, simulated less published, on `{network}`: layer by layer"
            f" {fmean(before):+.0f} points on the average ({min(before):+.0f} to"
            f" {max(before):+.0f}), scheduled {fmean(after):+.0f} ({min(after):+.0f} to"
            f" {max(after):+.0f})."
        )


def _slow_topk(cells: Sequence[Cell]) -> Iterator[str]:
    parts = [
        f"{cell.model} {cell.scaling(LAYERWISE):.0f} -> {cell.scaling(TWO_GROUPS):.0f} %"
        f" (published {pair[0]:.0f} -> {pair[1]:.0f})"
        for cell in cells
        if (cell.network, cell.compressor) == (cells[-1].network, SLOW_TOPK)
        and (pair := published_of(cell))
    ]
    if parts:
        yield (
            f"Top-k gains next to nothing in the figures. `{SLOW_TOPK}`, with the `torch.topk` of"
            f" those days, does the same on `{cells[-1].network}`: {', '.join(parts)}."
        )


def _reached(cells: Sequence[Cell]) -> Iterator[str]:
    """Which compressors gain as much by scheduling as is claimed."""
    parts, reach = [], list[str]()
    for network in unique(cells, "network"):
        own = [cell for cell in cells if cell.network == network]
        found, ours = (largest(own, one, names_model=True) for one in (simulated_gain, our_gain))
        if found is None or ours is None:
            continue
        reach += [
            f"{cell.compressor} on {cell.model}, `{network}`"
            for cell in own
            if cell.compressor != FP32 and simulated_gain(cell) >= LARGEST_GAIN
        ]
        parts.append(
            f"`{network}` {found[0]:.1f}x ({found[1]}{_of_dgc(own)}; ours {ours[0]:.1f}x,"
            f" {ours[1]})"
        )
    if parts:
        yield (
            f"{LARGEST_GAIN:g}x over the same compressor layer by layer (published: DGC, ResNet-50,"
            f" 8 GPUs, PCIe) is {_all_of(reach)}. The largest ratios: {'; '.join(parts)}."
        )


def _over_fp32(cells: Sequence[Cell]) -> Iterator[str]:
    parts = []
    for network in unique(cells, "network"):
        own = [cell for cell in cells if cell.network == network]
        model = own[0].model
        kinds = over_fp32([cell for cell in own if cell.model == model])
        figure, theirs, ours = (
            largest([cell for cell in own if cell.model == model], kind) for kind in kinds
        )
        if theirs is None or ours is None:
            continue
        beside = f"published {figure[0]:.1f}x, " if figure else ""
        parts.append(
            f"`{network}` {beside}simulated {theirs[0]:.1f}x ({theirs[1]}), ours {ours[0]:.1f}x"
            f" ({ours[1]})"
        )
    if parts:
        yield f"Against layer-wise FP32 of {cells[0].model}, at most: {'; '.join(parts)}."


def _of_dgc(cells: Sequence[Cell]) -> str:
    found = [simulated_gain(cell) for cell in cells if cell.compressor == "dgc"]
    return f", dgc at most {max(found):.1f}x" if found else ""


def _all_of(reach: Sequence[str]) -> str:
    return f"reached by {'; '.join(reach)}" if reach else "not reached by any compressor"


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
    """Whether FP16 scales by 99 % where it is said to."""
    plain = {
        (one.network, one.model, one.world_size): one for one in simulated if one.compressor == FP32
    }
    claimed = [
        (cell, plain[cell.network, cell.model, cell.world_size])
        for cell in simulated
        if cell.compressor == "fp16"
        and (pair := published_of(cell))
        and (pair[1] or 0.0) >= LARGEST_SCALING
    ]
    if not claimed:
        return
    is_met = all(round(cell.scaling(TWO_GROUPS)) >= LARGEST_SCALING for cell, _ in claimed)
    parts = [
        f"{cell.model} on {cell.world_size} GPUs {cell.scaling(TWO_GROUPS):.1f} %"
        f" (ours {cell.scaling(OURS_SCHEDULED):.1f} %, FP32 without scheduling"
        f" {fp32.scaling(LAYERWISE):.1f} %, published {(published_of(fp32) or (0.0, None))[0]:.0f})"
        for cell, fp32 in claimed
    ]
    yield (
        f"{LARGEST_SCALING:g} % (published: FP16 over NVLink) is"
        f" {'reached' if is_met else 'not reached everywhere'}: {'; '.join(parts)}."
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
