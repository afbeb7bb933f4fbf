"""Plans by every fusion that the recipe's config names, and their steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from omegaconf import DictConfig

from lightning_dear.apps.recipe.dear_fusion_cases import EXACT, Case, Fused, Trial
from lightning_dear.apps.recipe.simulated import listed, networks_of, workloads_of
from lightning_dear.planning import (
    AutoFusion,
    BayesianFusion,
    BucketPlan,
    FusionPlanner,
    LinkCost,
    MergeCompFusion,
    MGWFBPFusion,
    ModelTimes,
    NoFusion,
    PlanSearch,
    SearchingPlanner,
    SingleFusion,
    TensorSpec,
    ThresholdFusion,
)
from lightning_dear.simulator import Network, Workload, simulate
from lightning_dear.simulator.ranking import alone_s
from lightning_dear.simulator.strategies import Strategy, planned, searched

FUSIONS = ("none", "threshold", "single", "bayesian", "mgwfbp", "exact", "mergecomp", "auto")
"""What `fusions` may name; `threshold` stands for one with each of `caps`."""

TUNERS = ("bayesian", "auto")
"""Those that try plans before they keep one."""


def cases(cfg: DictConfig) -> Iterator[Case]:
    """Every model on every cluster under every fusion that the config names.

    Raises:
        ValueError: If it names what does not exist, or a planner refuses its options.
    """
    planners = planners_of(cfg)
    models = workloads_of(cfg)
    for cluster, network in networks_of(cfg, cfg.world_size).items():
        for workload in models:
            fused = {name: _fused(name, one, workload, network) for name, one in planners.items()}
            yield Case(cluster, workload.name, alone_s(workload), fused)


def planners_of(cfg: DictConfig) -> dict[str, FusionPlanner]:
    """Return the planners that `cfg.fusions` names; of `threshold` one for each cap, `25 MiB`.

    Raises:
        ValueError: If there is no such fusion, or a planner refuses its options.
    """
    made: dict[str, FusionPlanner] = {}
    for name in listed(cfg, "fusions"):
        made |= thresholds_of(cfg) if name == "threshold" else {name: _planner(name, cfg)}
    return made


def thresholds_of(cfg: DictConfig) -> dict[str, FusionPlanner]:
    """Return `25 MiB` and so on -> the planner with this cap.

    Raises:
        ValueError: If the caps are no list of positive numbers.
    """
    first_mb = float(cfg.first_bucket_cap_mb)
    return {
        f"{cap_mb:g} MiB": ThresholdFusion(bucket_cap_mb=cap_mb, first_bucket_cap_mb=first_mb)
        for cap_mb in _caps_mb(cfg)
    }


def _caps_mb(cfg: DictConfig) -> list[float]:
    caps = listed(cfg, "caps")
    try:
        return [float(cap) for cap in caps]
    except ValueError:
        raise ValueError(f"caps must be numbers of MiB, got {', '.join(caps)}.") from None


def _planner(name: str, cfg: DictConfig) -> FusionPlanner:
    match name:
        case "none":
            return NoFusion()
        case "single":
            return SingleFusion()
        case "bayesian":
            return BayesianFusion(first_bucket_cap_mb=cfg.first_bucket_cap_mb, **cfg.bayesian)
        case "mgwfbp":
            return MGWFBPFusion()
        case "exact" | "mergecomp":
            return MergeCompFusion(**cfg[name])
        case "auto":
            return AutoFusion(first_bucket_cap_mb=cfg.first_bucket_cap_mb, **cfg.auto)
    raise ValueError(f"Unknown fusion {name!r}; valid ones: {', '.join(FUSIONS)}.")


def _fused(name: str, planner: FusionPlanner, workload: Workload, network: Network) -> Fused:
    if name == EXACT:
        # As DeAR has it: what may be gathered sooner is no matter of fusion.
        workload = replace(workload, times=replace(workload.times, allows_early=False))
    trials: list[Trial] = []
    builder = planned(planner.plan)
    if isinstance(planner, SearchingPlanner):
        builder = searched(_Recorded(planner, trials))
    program = Strategy(name, f"ours, fused by {name}", builder).program(workload, network)
    return Fused(simulate(program), tuple(trials))


class _Recorded:
    """A planner, and a note of each trial of its search."""

    def __init__(self, planner: SearchingPlanner, trials: list[Trial]) -> None:
        self._planner, self._trials = planner, trials

    def plan(self, tensors: Sequence[TensorSpec], world_size: int) -> BucketPlan:
        return self._planner.plan(tensors, world_size)

    def search(
        self, tensors: Sequence[TensorSpec], world_size: int, times: ModelTimes, link: LinkCost
    ) -> PlanSearch:
        return _RecordedSearch(self._planner.search(tensors, world_size, times, link), self._trials)


class _RecordedSearch:
    def __init__(self, search: PlanSearch, trials: list[Trial]) -> None:
        self._search, self._trials = search, trials

    @property
    def best(self) -> BucketPlan:
        return self._search.best

    @property
    def reason(self) -> str:
        return self._search.reason

    def next(self) -> BucketPlan | None:
        return self._search.next()

    def tell(self, plan: BucketPlan, step_s: float) -> None:
        self._trials.append(Trial(plan.name, len(plan.buckets), step_s))
        self._search.tell(plan, step_s)
