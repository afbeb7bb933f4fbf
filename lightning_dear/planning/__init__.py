"""Planning is pure: a profile of the model in, a `BucketPlan` out; no tensors, no processes."""

from lightning_dear.planning.fusion import (
    FUSIONS,
    FusionPlanner,
    NoFusion,
    SingleFusion,
    ThresholdFusion,
    resolve_fusion,
)
from lightning_dear.planning.plan import BucketPlan, BucketSpec, Slice, TensorSpec

__all__ = [
    "FUSIONS",
    "BucketPlan",
    "BucketSpec",
    "FusionPlanner",
    "NoFusion",
    "SingleFusion",
    "Slice",
    "TensorSpec",
    "ThresholdFusion",
    "resolve_fusion",
]
