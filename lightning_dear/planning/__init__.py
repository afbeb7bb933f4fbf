"""Planning is pure: a profile of the model in, a `BucketPlan` out; no tensors, no processes."""

from lightning_dear.planning.all_reduce import choose_all_reduce
from lightning_dear.planning.auto import AutoFusion
from lightning_dear.planning.bayesian import BayesianFusion
from lightning_dear.planning.codec_cost import CodecCost, CodecCosts, Linear
from lightning_dear.planning.cost import LinkCost
from lightning_dear.planning.early import choose_early
from lightning_dear.planning.fusion import (
    FusionPlanner,
    NoFusion,
    SingleFusion,
    ThresholdFusion,
)
from lightning_dear.planning.mergecomp import MergeCompFusion
from lightning_dear.planning.mergecomp_heuristic import MergeCompHeuristicFusion
from lightning_dear.planning.mgwfbp import MGWFBPFusion
from lightning_dear.planning.plan import (
    BucketPlan,
    BucketSpec,
    FixedPlan,
    Slice,
    TensorSpec,
    save_plan,
)
from lightning_dear.planning.predict import Prediction, predict
from lightning_dear.planning.registry import FUSIONS, resolve_fusion
from lightning_dear.planning.search import PlanSearch, SearchingPlanner
from lightning_dear.planning.times import ModelTimes

__all__ = [
    "FUSIONS",
    "AutoFusion",
    "BayesianFusion",
    "BucketPlan",
    "BucketSpec",
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
    "Prediction",
    "SearchingPlanner",
    "SingleFusion",
    "Slice",
    "TensorSpec",
    "ThresholdFusion",
    "choose_all_reduce",
    "choose_early",
    "predict",
    "resolve_fusion",
    "save_plan",
]
