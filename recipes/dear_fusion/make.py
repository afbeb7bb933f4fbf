"""Fusion under DeAR's schedule: none, fixed caps, searched, MG-WFBP's rule, exact."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lightning_dear.apps.recipe.dear_fusion_cases import EXACT, Case, Fused
from lightning_dear.apps.recipe.dear_fusion_picture import traces
from lightning_dear.apps.recipe.dear_fusion_plans import TUNERS, cases, thresholds_of
from lightning_dear.apps.recipe.dear_fusion_said import said, signed
from lightning_dear.apps.recipe.report import Report, Table
from lightning_dear.apps.recipe.sibling import command_of, measured, measured_on
from lightning_dear.apps.recipe.steps import measured_steps

MEANINGS = {
    "none": "a bucket for every tensor",
    "single": "one bucket for all",
    "bayesian": "the best cap that a Gaussian process has tried",
    "mgwfbp": "MG-WFBP's rule with the cost of a half",
    EXACT: "the shortest predicted step, nothing gathered before backward has ended",
    "mergecomp": "the same, of fewer pieces, but some buckets may be gathered in backward",
    "auto": "the best of caps and of `mergecomp`'s plan, as tried; some buckets may be all-reduced",
}
"""Fusion -> what it is, in a line."""

CAPPED = "MiB: buckets up to this cap, larger tensors are cut"


def make(cfg: DictConfig, recorded: Path, folder: Path) -> Report:
    """Plan and simulate all models on all clusters; measure the sibling if asked to."""
    found = list(cases(cfg))
    names = list(found[0].fused)
    tuners = [name for name in TUNERS if name in names]
    caps = [name for name in thresholds_of(cfg) if name in names]
    siblings = measured(cfg, recorded, folder)
    where = measured_on(folder if cfg.measure else recorded, list(cfg.siblings))
    tables = [
        _steps(found, names),
        _losses(found, names),
        *([_tuning(found, tuners, float(cfg.near))] if tuners else []),
        *(
            measured_steps(rows, "dear", f"`{command_of(cfg.siblings[name])}` on {where}.")
            for name, rows in siblings.items()
        ),
    ]
    data = {"simulated": _simulated_rows(found), "traces": _trace_rows(found, tuners)}
    return Report(said(found, caps, float(cfg.near)), tables, traces(found, tuners), data)


def _steps(found: Sequence[Case], names: Sequence[str]) -> Table:
    rows = []
    for case in found:
        steps = [f"{1e3 * case.fused[name].step_s:.1f}" for name in names]
        rows.append([case.cluster, case.model, f"{1e3 * case.alone_s:.1f}", *steps])
    titles = ["cluster", "model", "one rank", *names]
    return Table("simulated", "step, ms", titles, rows, _legend(names))


def _legend(names: Sequence[str]) -> str:
    meanings = [f"{name}: {MEANINGS[name]}" for name in names if name in MEANINGS]
    has_caps = len(meanings) < len(names)
    return "; ".join([CAPPED, *meanings] if has_caps else meanings) + "."


def _losses(found: Sequence[Case], names: Sequence[str]) -> Table:
    rows = [
        [
            case.cluster,
            case.model,
            *(f"{case.loss(name):.1f} % ({case.fused[name].num_buckets})" for name in names),
        ]
        for case in found
    ]
    title = "how much longer than the best one's the step is (and how many buckets there are)"
    return Table("simulated", title, ["cluster", "model", *names], rows)


def _tuning(found: Sequence[Case], tuners: Sequence[str], near: float) -> Table:
    is_compared = all(EXACT in case.fused for case in found)
    titles = ["trials", "best at", "over best"]
    titles += [f"near {EXACT} at", f"over {EXACT}"] if is_compared else []
    rows = [
        [case.cluster, case.model, tuner, *_tuned(case, tuner, near, is_compared)]
        for tuner in tuners
        for case in found
    ]
    note = (
        f"best at: the number of the trial that was best, and its plan. near: at most {near:g} %"
        " longer. `auto` tries its best plans twice."
    )
    return Table("simulated", "tuners", ["cluster", "model", "tuner", *titles], rows, note)


def _tuned(case: Case, tuner: str, near: float, is_compared: bool) -> list[str]:
    trials, count = case.fused[tuner].trials, case.trials_of_best(tuner)
    cap_mb = trials[count - 1].cap_mb
    plan = trials[count - 1].plan if cap_mb is None else f"{cap_mb:.3g} MiB"
    cells = [str(len(trials)), f"{count}: {plan}", f"{case.loss(tuner):.1f} %"]
    if is_compared:
        after = case.trials_until(tuner, EXACT, near)
        cells += ["never" if after is None else str(after), f"{signed(case.over(tuner, EXACT))} %"]
    return cells


def _simulated_rows(found: Sequence[Case]) -> list[dict[str, Any]]:
    return [
        {"model": case.model, "cluster": case.cluster, "fusion": name, **_figures(case, fused)}
        for case in found
        for name, fused in case.fused.items()
    ]


def _figures(case: Case, fused: Fused) -> dict[str, Any]:
    return {
        "step_s": fused.step_s,
        "alone_s": case.alone_s,
        "num_buckets": fused.num_buckets,
        "num_early": fused.num_early,
        "num_all_reduced": fused.num_all_reduced,
        "sent_bytes": fused.step.sent_bytes,
    }


def _trace_rows(found: Sequence[Case], tuners: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            "model": case.model,
            "cluster": case.cluster,
            "fusion": tuner,
            "trial": number,
            "plan": trial.plan,
            "cap_mb": trial.cap_mb,
            "num_buckets": trial.num_buckets,
            "step_s": trial.step_s,
            "best_so_far_s": best_s,
            "best_plan_s": case.best_s,
        }
        for case in found
        for tuner in tuners
        for number, (trial, best_s) in enumerate(
            zip(case.fused[tuner].trials, case.fused[tuner].best_so_far_s(), strict=True), 1
        )
    ]
