"""Planners, which decide which tensors share a bucket.

They decide by the sizes of tensors, and some of them by measured times. A planner returns a
`BucketPlan`. Planning is pure: it touches no tensors and communicates with no other process. (But
`FixedPlan` may read a file.)
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
from lightning_dear.planning.search import PlanSearch, SearchingPlanner
from lightning_dear.planning.trials import AutoFusion, BayesianFusion

__all__ = ["FUSIONS", "FusionPlanner", "PlanSearch", "SearchingPlanner", "resolve_fusion"]
__all__ += ["BucketPlan", "FixedPlan", "TensorSpec", "predict", "save_plan"]
__all__ += ["CodecCost", "CodecCosts", "Linear", "LinkCost", "ModelTimes"]
__all__ += ["MGWFBPFusion", "NoFusion", "SingleFusion", "ThresholdFusion"]
__all__ += ["AutoFusion", "BayesianFusion", "MergeCompFusion", "MergeCompHeuristicFusion"]

_PLANNERS: tuple[type[Any], ...] = (
    *(ThresholdFusion, NoFusion, SingleFusion, MGWFBPFusion),
    *(BayesianFusion, MergeCompFusion, MergeCompHeuristicFusion, AutoFusion),
)
FUSIONS: dict[str, type[Any]] = {planner.name: planner for planner in _PLANNERS}
"""Name of a planner, as the option `fusion` takes it -> its class."""


def resolve_fusion(fusion: str | FusionPlanner, bucket_cap_mb: float | None) -> FusionPlanner:
    """Returns the planner that the user's options `fusion` and `bucket_cap_mb` stand for.

    Args:
        fusion: Name in `FUSIONS`, or a planner.
        bucket_cap_mb: Most MiB of a bucket, for fusion="threshold" alone. None means the planner's
            default.

    Returns:
        A new planner with its default options if `fusion` is a name, and otherwise `fusion`.

    Raises:
        ValueError: If the name is unknown, or if `bucket_cap_mb` is given and `fusion` is not
            "threshold".
        TypeError: If `fusion` is neither a name nor an object with a method `plan`.
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
