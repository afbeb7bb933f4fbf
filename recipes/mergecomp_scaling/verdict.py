"""What of MergeComp's claims a run of `mergecomp_scaling` reproduces, in a few short sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_dear.apps.recipe.mergecomp_cases import Cell
from lightning_dear.apps.recipe.mergecomp_fit import Fitted
from lightning_dear.apps.recipe.mergecomp_published import FP32, LARGEST_GAIN, LARGEST_SCALING
from lightning_dear.apps.recipe.mergecomp_schemes import LAYERWISE, TWO_GROUPS
from lightning_dear.apps.recipe.mergecomp_tables import (
    beside_figures,
    largest,
    published_of,
    simulated_gain,
    unique,
)

CLOSE = 5
"""Points by which a scaling factor may be off and count as reproduced."""

_HALF_A_DIGIT = 0.05
"""Of per cent as they are shown: what is shown as 99.0 counts as 99."""


def verdict(fit: Fitted | None, simulated: Sequence[Cell], varied: Sequence[Cell]) -> Iterator[str]:
    """Yield what is reproduced, what is not, and why; five sentences at most.

    Args:
        fit: The fitted network, if there is one.
        simulated: All of the recipe's.
        varied: Of one model with other starts of kernels; may be none.
    """
    most = max(one.world_size for one in simulated)
    of_most = [one for one in simulated if one.world_size == most]
    yield from _beside_figures(of_most)
    yield from _largest_gain(of_most)
    yield from _full_scaling(simulated)
    reasons = [*_nominal(fit, of_most), *_kernels(varied)]
    if reasons:
        yield f"Why, as far as it can be computed: {'; and '.join(reasons)}."


def _beside_figures(cells: Sequence[Cell]) -> Iterator[str]:
    """Whether scheduling gains, and by how much; on the last network that has such figures."""
    known = beside_figures(cells)
    if not known:
        return
    network = known[-1][0].network
    own = [one for one in known if one[0].network == network]
    rising = [cell for cell, before, after in own if after > before]
    shorter = sum(simulated_gain(cell) > 1 for cell in rising)
    yield (
        f"{_reproduced(shorter, len(rising))}: scheduling shortens a step in {shorter} of the"
        f" {len(rising)} cases where it is published to, on `{network}`."
    )
    layerwise = sum(abs(cell.scaling(LAYERWISE) - before) <= CLOSE for cell, before, _ in own)
    scheduled = sum(abs(cell.scaling(TWO_GROUPS) - after) <= CLOSE for cell, _, after in own)
    yield (
        f"{_reproduced(layerwise + scheduled, 2 * len(own))}: the scaling factors there. Of"
        f" {len(own)} each, {layerwise} layer by layer and {scheduled} scheduled are met to"
        f" {CLOSE} points."
    )


def _largest_gain(cells: Sequence[Cell]) -> Iterator[str]:
    found = largest(cells, simulated_gain, "{0.compressor} on {0.model}, `{0.network}`")
    if found is None:
        return
    of_all = f"the largest of all is {found[0]:.1f}x ({found[1]})"
    dgc = largest([cell for cell in cells if cell.compressor == "dgc"], simulated_gain)
    if dgc is None:
        yield f"{LARGEST_GAIN:g}x is published for DGC, which was left out; {of_all}."
        return
    yield (
        f"{_reproduced(int(dgc[0] >= LARGEST_GAIN), 1)}: {LARGEST_GAIN:g}x over the same compressor"
        f" layer by layer (DGC on ResNet-50, 8 GPUs, PCIe). DGC gains at most {dgc[0]:.1f}x here;"
        f" {of_all}."
    )


def claimed_to_scale(simulated: Sequence[Cell]) -> list[tuple[Cell, Cell]]:
    """Return FP16 where it is published to scale by 99 %, each with FP32 beside it."""
    plain = {
        (one.network, one.model, one.world_size): one for one in simulated if one.compressor == FP32
    }
    return [
        (cell, plain[cell.network, cell.model, cell.world_size])
        for cell in simulated
        if cell.compressor == "fp16"
        and (pair := published_of(cell))
        and (pair[1] or 0.0) >= LARGEST_SCALING
    ]


def _full_scaling(simulated: Sequence[Cell]) -> Iterator[str]:
    claimed = claimed_to_scale(simulated)
    if not claimed:
        return
    least = LARGEST_SCALING - _HALF_A_DIGIT
    figures = [fp32.scaling(LAYERWISE) for _, fp32 in claimed]
    claim = f"{LARGEST_SCALING:g} % (published: FP16 over NVLink) is"
    if any(cell.scaling(TWO_GROUPS) < least for cell, _ in claimed):
        yield f"Not reproduced: {claim} not reached everywhere."
    elif min(figures) >= least:
        yield (
            f"{claim} reached, as uncompressed FP32 reaches it, too ({_range(figures)} %): no"
            " evidence for scheduling."
        )
    else:
        yield (
            f"Reproduced: {claim} reached; uncompressed FP32 does not reach it everywhere"
            f" ({_range(figures)} %)."
        )


def _nominal(fit: Fitted | None, cells: Sequence[Cell]) -> Iterator[str]:
    """How FP32 scales where nothing was fitted: what is missing has nothing to do with codecs."""
    own = [
        (cell.scaling(LAYERWISE), pair[0])
        for cell in cells
        if cell.compressor == FP32
        and (fit is None or cell.network != fit.name)
        and (pair := published_of(cell))
    ]
    if own:
        here, published = zip(*own, strict=True)
        yield (
            f"at nominal rates uncompressed FP32 scales by {_range(here)} % (published"
            f" {_range(published)}), so that something held theirs up that is not simulated"
        )


def _kernels(cells: Sequence[Cell]) -> Iterator[str]:
    gains = {
        kernel_s: found[0]
        for kernel_s in unique(cells, "kernel_s")
        if (found := largest([one for one in cells if one.kernel_s == kernel_s], simulated_gain))
    }
    if len(gains) > 1:
        ends = " to ".join(
            f"{gains[one]:.1f}x ({1e6 * one:g} us)" for one in (min(gains), max(gains))
        )
        yield f"the largest ratio goes from {ends} with what starting a kernel is taken to last"


def _reproduced(num: int, of: int) -> str:
    if num == of:
        return "Reproduced"
    return "Mostly reproduced" if 2 * num > of else "Not reproduced"


def _range(figures: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{one:.0f}" for one in (min(figures), max(figures))))
