"""Somebody else's clusters: published figures beside what is predicted from the stated facts."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from omegaconf import DictConfig

from lightning_dear.apps.plan.config import device_of
from lightning_dear.apps.recipe.report import Claim, Report, grouped_bars, is_plausible
from lightning_dear.simulator import Link, Network, Workload, ranking, strategies
from lightning_dear.studies.device_costs import compressed
from lightning_dear.workloads.replay.profile import LayerProfile, ModelProfile, planned

Row = dict[str, Any]

AVERAGED = "averaged"
"""Way of a step after which an all-reduce averages each parameter: local SGD, one step a round."""

_STATED = "claim", "source", "assumed", "hosts", "gpus", "rate_mbit", "compute_s", "unit"


def make(cfg: DictConfig, siblings: object) -> Report:
    """Predict all published figures. Nothing is fitted to them, and `siblings` are not used.

    Raises:
        ValueError: If the config has an unknown name, or a number is out of range.
    """
    rows = [_row(cfg, facts) for facts in _facts(cfg)]
    claims = [_claim(list(own)) for _, own in groupby(rows, key=itemgetter("claim"))]
    return Report(claims, rows, _picture(rows))


def _facts(cfg: DictConfig) -> Iterator[Row]:
    """Yield the facts of each figure: its own, its claim's, and its publication's."""
    for publication in cfg.publications.values():
        for name, claim in publication.claims.items():
            yield from ({**publication, **claim, **one, "claim": name} for one in claim.figures)


def _row(cfg: DictConfig, facts: Row) -> Row:
    """Return the row of the summary with what is predicted, in the unit of the figure."""
    workload, between = _workload(facts), Link(cfg.alpha_s, 8e-6 / facts["rate_mbit"])
    size, gpus = facts["hosts"] * facts["gpus"], facts["gpus"]
    network = Network(between, size, gpus, Link(**cfg.within))
    step_s, *others_s = (_step_s(cfg, way, workload, network) for way in facts["ways"])
    done = others_s[0] if others_s else facts.get("work")
    simulated, published = done / step_s if done else step_s, facts["published"]
    figures = {"published": published, "simulated": simulated, "error": simulated / published - 1}
    return {key: facts[key] for key in _STATED} | figures


def _workload(facts: Row) -> Workload:
    """Return the model. A layer's share of the seconds is its share of the parameters."""
    layers = [
        LayerProfile("", tuple((numel,) for numel in numels), sum(numels), 2 * sum(numels))
        for repeats, *numels in facts["layers"]
        for _ in range(repeats)
    ]
    profile = ModelProfile(facts["claim"], "stated", "", tuple(layers))
    timed = profile.with_compute(facts["compute_s"])
    return Workload(profile.name, *planned(timed, facts["step_s"]))


def _step_s(cfg: DictConfig, way: str, workload: Workload, network: Network) -> float:
    """Return the seconds of a step. A way is "STRATEGY", "STRATEGY + COMPRESSOR" or `AVERAGED`."""
    if way == AVERAGED:
        sums_s = (network.all_reduce_s(one.numel * one.itemsize) for one in workload.tensors)
        return ranking.alone_s(workload) + sum(sums_s)
    name, _, compressor = way.partition(" + ")
    if compressor:
        workload = compressed(workload, compressor, device_of(cfg), network.world_size)
    return ranking.predicted(strategies.resolve_strategy(name), workload, network).step.step_s


def _claim(rows: Sequence[Row]) -> Claim:
    def listed(key: str, form: str, scale: float = 1.0) -> str:
        return ", ".join(format(scale * row[key], form) for row in rows)

    first, worst = rows[0], max(rows, key=lambda row: abs(1 / (1 + row["error"]) - 1))
    published = f"{listed('published', 'g')} {first['unit']}"
    here = f"{listed('simulated', '.3g')} {first['unit']}; {listed('error', '+.2g', 100)} %"
    plausible = is_plausible(worst["simulated"], worst["published"])
    words = first["assumed"], first["source"]
    return Claim(first["claim"], published, here, "simulated", *words, plausible)


def _picture(rows: Sequence[Row]) -> Any:
    """Draw the errors of the first publication by rate."""
    own = [row for row in rows if row["source"] == rows[0]["source"]]
    errors = {
        (row["source"], row["claim"], f"{row['rate_mbit']} Mb/s"): 100 * row["error"] for row in own
    }
    return grouped_bars(errors, "%", "Simulated steps over published ones, minus 1", 0)
