"""What came out of the comparison of fusions, in sentences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from lightning_dear.apps.recipe.dear_fusion_cases import EXACT, Case

PUBLISHED = (
    "Published: DeAR finds the cap of its buckets by Bayesian optimization (arXiv 2302.12445); its"
    " code tries 10 caps between 1 and 256 MB and begins with 25 MB. No figure of what that gains"
    " is known to us, so none of the figures below stands beside a published one."
)

SAME = 0.2
"""Per cent of the step by which plans may differ and count as equally good: below that the exact
planner itself takes the one with fewer buckets."""


def said(cases: Sequence[Case], caps: Sequence[str], near: float) -> list[str]:
    """Return sentences on all that was compared; those that lack something to compare are left out.

    Args:
        cases: Every model on every cluster; under the same fusions, at least one.
        caps: Names of the fixed caps among those.
        near: Per cent by which a tuner's plan may be slower than the exact one to count as near it.
    """
    names = cases[0].fused
    sentences = [PUBLISHED]
    sentences += [_cost(cases, name) for name in ("none", "single") if name in names]
    sentences += [_caps(cases, caps)] if caps else []
    if EXACT in names:
        sentences += [_exact(cases)]
        sentences += [_bayesian(cases, near)] if "bayesian" in names else []
        sentences += [_mgwfbp(cases)] if "mgwfbp" in names else []
    sentences += [_freer(cases, name) for name in ("mergecomp", "auto") if name in names]
    return sentences


def _most(cases: Sequence[Case], figure: Callable[[Case], float]) -> str:
    """Which model on which cluster has the highest figure."""
    worst = max(cases, key=figure)
    return f"{worst.model} on `{worst.cluster}`"


def _num_best(cases: Sequence[Case], name: str) -> str:
    best = sum(case.loss(name) <= SAME for case in cases)
    most = max(case.loss(name) for case in cases)
    where = _most(cases, lambda case: case.loss(name))
    return (
        f"as good as the best plan, to {SAME:g} %, in {best} of {len(cases)} cases; it loses at"
        f" most {most:.1f} % ({where})"
    )


def _cost(cases: Sequence[Case], name: str) -> str:
    what = {"none": "No fusion takes", "single": "One bucket for all takes"}[name]
    times = [1 + case.loss(name) / 100 for case in cases]
    return (
        f"{what} {min(times):.2f} to {max(times):.2f} times as long as the best plan"
        f" (longest: {_most(cases, lambda case: case.loss(name))})."
    )


def _caps(cases: Sequence[Case], caps: Sequence[str]) -> str:
    clusters = groupby(cases, key=lambda case: case.cluster)
    parts = [_best_cap(cluster, list(of), caps) for cluster, of in clusters]
    return f"Of the fixed caps {', '.join(caps)} the best one for all models is {'; '.join(parts)}."


def _best_cap(cluster: str, cases: Sequence[Case], caps: Sequence[str]) -> str:
    def loss(cap: str) -> float:
        return max(case.loss(cap) for case in cases)

    cap = min(caps, key=loss)
    model = max(cases, key=lambda case: case.loss(cap)).model
    return f"{cap} on `{cluster}`, which loses up to {loss(cap):.1f} % ({model})"


def _exact(cases: Sequence[Case]) -> str:
    return (
        f"The exact plan is {_num_best(cases, EXACT)}: it cuts no tensor, joins small ones"
        " beforehand, and here gathers nothing in backward."
    )


def _bayesian(cases: Sequence[Case], near: float) -> str:
    counts = [case.trials_until("bayesian", EXACT, near) for case in cases]
    reached = [count for count in counts if count is not None]
    later = [count for count in reached if count > 1]
    after = f" and in {len(later)} after up to {max(later)} trials" if later else ""
    over = [case.over("bayesian", EXACT) for case in cases]
    return (
        f"The Bayesian tuner is within {near:g} % of the exact plan in {len(reached)} of"
        f" {len(cases)} cases: in {counts.count(1)} with the cap that it begins with{after}. In the"
        f" end its steps are {signed(min(over))} to {signed(max(over))} % longer"
        f" (longest: {_most(cases, lambda case: case.over('bayesian', EXACT))})."
    )


def _mgwfbp(cases: Sequence[Case]) -> str:
    over = [case.over("mgwfbp", EXACT) for case in cases]
    where = _most(cases, lambda case: case.over("mgwfbp", EXACT))
    return (
        f"MG-WFBP's rule makes steps that are {signed(min(over))} to {signed(max(over))} % longer"
        f" than the exact plan's (longest: {where})."
    )


def _freer(cases: Sequence[Case], name: str) -> str:
    what = {
        "mergecomp": "`mergecomp`, which may gather in backward,",
        "auto": "`auto`, which tries `mergecomp`'s plan and caps and may all-reduce some buckets,",
    }[name]
    counts = [case.trials_of_best(name) for case in cases if case.fused[name].trials]
    found = f". Its best plan is among the first {max(counts)} trials" if counts else ""
    return f"{what} is {_num_best(cases, name)}{found}."


def signed(percent: float) -> str:
    """Return a figure with one decimal and its sign, which zero has not."""
    text = f"{percent:+.1f}"
    return "0.0" if float(text) == 0 else text
