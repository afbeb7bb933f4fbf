"""Fusions under DeAR's schedule: none, fixed caps, a tuned cap, MG-WFBP's rule, and exact."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from omegaconf import DictConfig

from lightning_dear.apps.recipe.report import Claim, Report, Sibling, grouped_bars
from lightning_dear.apps.recipe.simulated import listed, networks_of, progress, workloads_of
from lightning_dear.planning import FUSIONS, FusionPlanner, SearchingPlanner, ThresholdFusion
from lightning_dear.planning.step import ALL_REDUCE, REDUCE_SCATTER
from lightning_dear.simulator import Network, SimulatedStep, Workload, ranking, simulate
from lightning_dear.simulator.strategies import planned, searched

Row = Mapping[str, Any]

EXACT = "exact"
"""`fusion=mergecomp` with the options `exact` of this recipe; all others are compared with it."""

CLAIMS = {
    "none": ("a bucket for every tensor", "slower"),
    "single": ("one bucket", "slower"),
    "25 MiB": ("25 MiB, not tuned", "slower"),
    "bayesian": ("a tuned cap", "best"),
    "mgwfbp": ("MG-WFBP's rule", "slower"),
    EXACT: ("the exact plan", "ours"),
    "auto": ("fusion=auto", "ours"),
}
"""Fusion -> its description, and the paper's verdict on it."""

HIGHEST = 60
"""Per cent at which bars are cut off: some would be twenty times as high."""


def make(cfg: DictConfig, siblings: Mapping[str, Sibling]) -> Report:
    """Plan and simulate all models on all clusters under every fusion.

    Raises:
        ValueError: If the config has an unknown name, or a planner refuses its options.
    """
    planners, summary = planners_of(cfg), list[Row]()
    networks = networks_of(cfg, cfg.world_size)
    models = {workload.name: workload for workload in workloads_of(cfg)}
    steps = {
        (cluster, model, name): _step(planners[name], models[model], networks[cluster])
        for cluster, model, name in progress([*product(networks, models, planners)], "planning")
    }
    for cluster, model in product(networks, models):
        own = {name: steps[cluster, model, name] for name in planners}
        summary += _rows(cluster, models[model], own)
    claims = [*_simulated_claims(summary), *_measured_claims(siblings)]
    return Report(claims, summary, _picture(summary))


def planners_of(cfg: DictConfig) -> dict[str, FusionPlanner]:
    """Return name -> planner of each of `cfg.fusions`; `threshold` has one for each cap ("25 MiB").

    Raises:
        ValueError: If a fusion is unknown, or a planner refuses its options.
    """
    made: dict[str, FusionPlanner] = {}
    for name in listed(cfg, "fusions"):
        if name == "threshold":
            first_mb = float(cfg.first_bucket_cap_mb)
            for cap_mb in map(float, cfg.caps):
                capped = ThresholdFusion(bucket_cap_mb=cap_mb, first_bucket_cap_mb=first_mb)
                made[f"{cap_mb:g} MiB"] = capped
        elif name in (EXACT, *FUSIONS):
            made[name] = FUSIONS["mergecomp" if name == EXACT else name](**cfg.get(name, {}))
        else:
            valid = ", ".join((EXACT, *FUSIONS))
            raise ValueError(f"Unknown name {name!r} in fusions; valid names: {valid}.")
    return made


def _rows(cluster: str, workload: Workload, steps: Mapping[str, SimulatedStep]) -> Iterator[Row]:
    best_s = min(step.step_s for step in steps.values())
    for name, step in steps.items():
        kinds = [message.kind for message in step.program.messages]
        yield {
            "cluster": cluster,
            "model": workload.name,
            "fusion": name,
            "alone_s": ranking.alone_s(workload),
            "step_s": step.step_s,
            "loss": step.step_s / best_s - 1,
            "num_buckets": kinds.count(REDUCE_SCATTER) + kinds.count(ALL_REDUCE),
            "num_all_reduced": kinds.count(ALL_REDUCE),
        }


def _step(planner: FusionPlanner, workload: Workload, network: Network) -> SimulatedStep:
    build = searched(planner) if isinstance(planner, SearchingPlanner) else planned(planner.plan)
    return simulate(build(workload, network))


def _simulated_claims(summary: Sequence[Row]) -> Iterator[Claim]:
    """Yield how much slower each fusion is than the best one: least and most over all cases."""
    for fusion, (words, published) in CLAIMS.items():
        if losses := [100 * row["loss"] for row in summary if row["fusion"] == fusion]:
            here = f"+{min(losses):.1f} to +{max(losses):.1f} %"
            yield Claim(words, published, here, "simulated")


def _measured_claims(siblings: Mapping[str, Sibling]) -> Iterator[Claim]:
    """Yield how much slower each fusion is than the default one, on the siblings' models."""
    rows = [row for sibling in siblings.values() for row in sibling.rows()]
    dear_s = {row["model"]: float(row["step_s"]) for row in rows if row["entry"] == "dear"}
    for name in ("none", "single", "bayesian", "auto"):
        own = [row for row in rows if row["entry"] == f"dear_{name}"]
        if losses := [100 * (float(row["step_s"]) / dear_s[row["model"]] - 1) for row in own]:
            yield Claim(*CLAIMS[name], f"{min(losses):+.1f} to {max(losses):+.1f} %", "measured")


def _picture(summary: Sequence[Row]) -> Any:
    losses = {
        (row["cluster"], row["fusion"], row["model"]): min(100 * row["loss"], HIGHEST)
        for row in summary
    }
    title = f"How much longer than the best one's a step is, simulated; bars end at {HIGHEST} %"
    return grouped_bars(losses, "%", title, None)
