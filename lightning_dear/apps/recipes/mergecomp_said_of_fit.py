"""What of MergeComp's figures was fitted, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_dear.apps.recipes.mergecomp_cases import Cell
from lightning_dear.apps.recipes.mergecomp_fit import Fitted
from lightning_dear.apps.recipes.mergecomp_published import FP32, fp32_on_pcie
from lightning_dear.apps.recipes.mergecomp_schemes import LAYERWISE
from lightning_dear.apps.recipes.mergecomp_tables import published_of


def said_of_fit(fit: Fitted | None, simulated: Sequence[Cell]) -> Iterator[str]:
    """Yield what was fitted, and how FP32 scales where nothing was."""
    if fit is None:
        return
    most = max(one.world_size for one in simulated)
    others = [
        f"{model}, which computes {1e3 * seconds:.0f} ms there (with the assumed seconds"
        f" {fit.assumed[model]:.0f} %, published {fp32_on_pcie(model):.0f} %)"
        for model, seconds in fit.seconds.items()
    ]
    also = f" So does that of {' and of '.join(others)}." if others else ""
    yield (
        f"`{fit.name}` is `{fit.cluster}` at {1e9 * fit.beta_s:.2f} ns a byte"
        f" ({1e-9 / fit.beta_s:.2f} GB/s), where layer-wise FP32 of {fit.model} on {most} GPUs"
        f" scales as published.{also} Nothing of compressors is fitted."
    )
    fewer = [
        f"{cell.scaling(LAYERWISE):.0f} % on {cell.world_size} GPUs (published {pair[0]:.0f})"
        for cell in simulated
        if (cell.network, cell.compressor) == (fit.name, FP32)
        and cell.world_size < most
        and (pair := published_of(cell))
    ]
    if fewer:
        yield f"On fewer GPUs, where nothing is fitted, it scales by {' and '.join(fewer)}."
