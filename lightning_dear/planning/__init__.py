"""Planners: functions of tensor sizes and measured times that return a `BucketPlan`.

Planning is pure: it touches no tensors and communicates with no other process.
"""

from typing import Any

from lightning_dear.names import check_name
from lightning_dear.planning.fusion import FusionPlanner, NoFusion, SingleFusion, ThresholdFusion
from lightning_dear.planning.measured import CodecCost, CodecCosts, Linear, LinkCost, ModelTimes
from lightning_dear.planning.plan import BucketPlan, FixedPlan, TensorSpec, save_plan
from lightning_dear.planning.predict import predict
from lightning_dear.planning.predicting import (
    MergeCompFusion,
    MergeCompHeuristicFusion,
    MGWFBPFusion,
)
from lightning_dear.planning.refine import choose_all_reduce, choose_early
from lightning_dear.planning.search import PlanSearch, SearchingPlanner
from lightning_dear.planning.trials import AutoFusion, BayesianFusion

__all__ = [
    "FUSIONS",
    "AutoFusion",
    "BayesianFusion",
    "BucketPlan",
    "CodecCost",
    "CodecCosts",
    "FixedPlan",
    "FusionPlanner",
    "Linear",
    "LinkCost",
    "MGWFBPFusion",
    "MergeCompFusion",
    "MergeCompHeuristicFusion",
    "ModelTimes",
    "NoFusion",
    "PlanSearch",
    "SearchingPlanner",
    "SingleFusion",
    "TensorSpec",
    "ThresholdFusion",
    "choose_all_reduce",
    "choose_early",
    "predict",
    "resolve_fusion",
    "save_plan",
]

_PLANNERS: tuple[type[Any], ...] = (
    *(ThresholdFusion, NoFusion, SingleFusion, MGWFBPFusion),
    *(BayesianFusion, MergeCompFusion, MergeCompHeuristicFusion, AutoFusion),
)
FUSIONS: dict[str, type[Any]] = {planner.name: planner for planner in _PLANNERS}
"""Name, as the option `fusion` takes it -> class of the planner."""


def resolve_fusion(fusion: str | FusionPlanner, bucket_cap_mb: float | None) -> FusionPlanner:
    """Returns the planner that the user's options `fusion` and `bucket_cap_mb` stand for.

    Args:
        fusion: Name in `FUSIONS`, or a planner.
        bucket_cap_mb: Cap of a bucket in MiB, for fusion="threshold" alone. None means the
            planner's default.

    Raises:
        ValueError: If the name is unknown, or if a cap is given with any other planner.
        TypeError: If `fusion` is neither a name nor a planner.
    """
    if isinstance(fusion, str):
        check_name("fusion", fusion, FUSIONS)
        if fusion == "threshold":
            return ThresholdFusion(bucket_cap_mb=bucket_cap_mb)
    elif isinstance(fusion, type) or not callable(getattr(fusion, "plan", None)):
        raise TypeError(
            f"fusion must be one of {', '.join(FUSIONS)} or an object with a plan() method,"
            f" got {fusion!r}."
        )
    if bucket_cap_mb is not None:
        name = repr(fusion) if isinstance(fusion, str) else type(fusion).__name__
        raise ValueError(
            f"bucket_cap_mb={bucket_cap_mb} has no effect with fusion={name}. Leave it out, or set"
            " it in the planner: fusion=ThresholdFusion(bucket_cap_mb=...), under Hydra"
            " fusion.bucket_cap_mb=..."
        )
    return FUSIONS[fusion]() if isinstance(fusion, str) else fusion
