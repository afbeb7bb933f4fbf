"""The table of planners' names."""

from __future__ import annotations

from typing import Any

from lightning_dear.names import is_meant
from lightning_dear.planning.auto import AutoFusion
from lightning_dear.planning.bayesian import BayesianFusion
from lightning_dear.planning.fusion import FusionPlanner, NoFusion, SingleFusion, ThresholdFusion
from lightning_dear.planning.mergecomp import MergeCompFusion
from lightning_dear.planning.mergecomp_heuristic import MergeCompHeuristicFusion
from lightning_dear.planning.mgwfbp import MGWFBPFusion

FUSIONS: dict[str, type[Any]] = {
    "threshold": ThresholdFusion,
    "none": NoFusion,
    "single": SingleFusion,
    "mgwfbp": MGWFBPFusion,
    "bayesian": BayesianFusion,
    "mergecomp": MergeCompFusion,
    "mergecomp_heuristic": MergeCompHeuristicFusion,
    "auto": AutoFusion,
}


def resolve_fusion(fusion: str | FusionPlanner, bucket_cap_mb: float | None) -> FusionPlanner:
    """The planner that a user's `fusion` and `bucket_cap_mb` (MiB) mean.

    Raises:
        ValueError: For an unknown name, or a cap given to a planner that has none.
        TypeError: If `fusion` is neither a name nor a planner.
    """
    if isinstance(fusion, str):
        if fusion not in FUSIONS:
            raise ValueError(
                f"Unknown fusion {fusion!r}; valid names: {', '.join(FUSIONS)}."
                f"{is_meant(fusion, FUSIONS)}"
            )
        if fusion == "threshold":
            return ThresholdFusion(bucket_cap_mb=bucket_cap_mb)
    elif not callable(getattr(fusion, "plan", None)):
        raise TypeError(
            f"fusion must be one of {', '.join(FUSIONS)} or an object with a plan() method,"
            f" got {type(fusion).__name__}."
        )
    if bucket_cap_mb is not None:
        raise ValueError(
            f"bucket_cap_mb={bucket_cap_mb} has no effect with fusion={_name_of(fusion)}; leave it"
            " out, or set it there: fusion=ThresholdFusion(bucket_cap_mb=...), under Hydra"
            " fusion.bucket_cap_mb=..."
        )
    return FUSIONS[fusion]() if isinstance(fusion, str) else fusion


def _name_of(fusion: str | FusionPlanner) -> str:
    return repr(fusion) if isinstance(fusion, str) else type(fusion).__name__
