"""MergeComp: up to 3.83x for a compressor, scaling by up to 99 % (arXiv 2103.15195)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig

from lightning_dear.apps.plan.config import device_of
from lightning_dear.apps.recipe.report import Report, Sibling, grouped_bars
from lightning_dear.apps.recipe.simulated import networks_of
from lightning_dear.compression import DGC
from lightning_dear.planning import BucketPlan, TensorSpec, fusion
from lightning_dear.simulator import Network, Workload, ranking
from lightning_dear.simulator.strategies import Strategy, planned
from lightning_dear.studies.device_costs import compressed

from . import fit
from .claims import claims_of

Row = dict[str, Any]


def make(cfg: DictConfig, siblings: Mapping[str, Sibling]) -> Report:
    """Fit hosts to ResNet-50, predict the other models, and simulate all without a host's cost.

    Raises:
        ValueError: If the config has an unknown name, or no value gives a published figure.
    """
    published = list(fit.read_figures())
    server = fit.Server.of(cfg, published)
    predicted = list(server.predicted(published))
    simulated = list(_simulated(cfg, server, published))
    kinds = {"published": published, "predicted": predicted, "simulated": simulated}
    rows = [
        _row(kind, one, ranking.alone_s(server.workloads[one.model]), server.host(one))
        for kind, figures in kinds.items()
        for one in figures
    ]
    claims = list(claims_of(cfg, server, published, predicted, simulated))
    return Report(claims, [*rows, *_measured(siblings)], _picture(published, predicted))


# --- simulated and measured figures ---------------------------------------------------------------


def _simulated(cfg: DictConfig, server: fit.Server, figures: fit.Figures) -> Iterator[fit.Figure]:
    """Yield scaling factors without host time: on all GPUs over PCIe, and on two over NVLink."""
    for one in figures:
        if one.is_of(fit.PCIE, fit.GPUS):
            network = server.network
        elif one.is_of(fit.NVLINK, 2):
            network = networks_of(cfg, 2)[fit.NVLINK]
        else:
            continue
        workload = _compressed(cfg, server.workloads[one.model], one.compressor, network)
        layerwise = fit.scaling(fit.LAYERWISE, workload, network)
        merged = layerwise if one.compressor == fit.FP32 else _merged(workload, network)
        yield replace(one, pair=(layerwise, merged))


def _compressed(cfg: DictConfig, workload: Workload, name: str, network: Network) -> Workload:
    if name == fit.FP32:
        return workload
    compressor = DGC(density=float(cfg.dgc_density)) if name == "dgc" else name
    return compressed(workload, compressor, device_of(cfg), network.world_size)


def _merged(workload: Workload, network: Network) -> float:
    """Return the largest scaling factor of tensors merged into two groups, over all cuts."""

    def cut_at(place: int) -> Strategy:
        def plan(tensors: Sequence[TensorSpec], world_size: int) -> BucketPlan:
            # `fuse_groups` puts the tensors before the cut into a second group.
            return fusion.fuse_groups("merged", tensors, world_size, [range(place, len(tensors))])

        return Strategy("merged", planned(plan, all_reduces=True), compresses="whole")

    places = range(1, len(workload.tensors))
    return max(fit.scaling(cut_at(place), workload, network) for place in places)


def _row(kind: str, one: fit.Figure, compute_s: float, host: tuple[float, float | None]) -> Row:
    """Return a row of the summary: a figure, and the host that gives it."""
    row = {"kind": kind, **vars(one), "compute_s": compute_s}
    row["layerwise"], row["scheduled"] = row.pop("pair")
    row["host_per_tensor_s"], row["host_per_byte_s"] = host
    return row


def _measured(siblings: Mapping[str, Sibling]) -> Iterator[Row]:
    """Yield rows of the siblings: a bucket for each tensor, and buckets of MergeComp's search."""
    for name, sibling in siblings.items():
        rows = {(row["point"].partition("=")[2], row["entry"]): row for row in sibling.rows()}
        for compressor in dict.fromkeys(compressor for compressor, _ in rows):
            entries = "layerwise", "heuristic", "compute alone"
            layerwise, merged, alone = (rows[compressor, entry] for entry in entries)
            saved_s = float(layerwise["step_s"]) - float(merged["step_s"])
            num_merged = int(layerwise["num_buckets"]) - int(merged["num_buckets"])
            ratio, num_ranks = float(alone["ratio"]), int(alone["world_size"])
            pair = ratio / float(layerwise["ratio"]), ratio / float(merged["ratio"])
            figure = fit.Figure(name, num_ranks, alone["model"], compressor, pair)
            yield _row("measured", figure, float(alone["step_s"]), (saved_s / num_merged, None))


def _picture(published: fit.Figures, predicted: fit.Figures) -> Any:
    names = [one.compressor for one in predicted if one.model == fit.OTHERS[0]]
    panels = {}
    for model in fit.OTHERS:
        kinds = {
            kind: {
                one.compressor: one.pair for one in figures if one.is_of(fit.PCIE, fit.GPUS, model)
            }
            for kind, figures in (("published", published), ("predicted", predicted))
        }
        panels[f"{model}, {fit.GPUS} GPUs over PCIe"] = {
            f"{scheme}, {kind}": [100 * pairs[name][place] for name in names]
            for place, scheme in enumerate(("layer by layer", "merged"))
            for kind, pairs in kinds.items()
        }
    title = f"Scaling factor: published, and predicted from {fit.FITTED}"
    return grouped_bars(panels, names, "%", title, 100)
