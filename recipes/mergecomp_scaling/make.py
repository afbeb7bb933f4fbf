"""MergeComp: up to 3.83x for a compressor, scaling by up to 99 % (arXiv 2103.15195)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from omegaconf import DictConfig

from lightning_dear.apps.plan.config import device_of
from lightning_dear.apps.recipe.report import PLAUSIBLE, Claim, Report, Sibling, check, grouped_bars
from lightning_dear.apps.recipe.simulated import networks_of
from lightning_dear.compression import DGC
from lightning_dear.planning import BucketPlan, TensorSpec, fusion
from lightning_dear.simulator import Network, Workload, ranking, strategies
from lightning_dear.studies.device_costs import compressed

from . import fit
from .fit import FITTED, FP32, GPUS, NVLINK, OTHERS, PCIE, Figure, Figures, Server

Row = dict[str, Any]

GAIN = 3.83
"""Largest speed-up of scheduled over layer-by-layer compression, from the paper's abstract."""


def make(cfg: DictConfig, siblings: Mapping[str, Sibling]) -> Report:
    """Fit hosts to ResNet-50, predict the other models, and simulate all without a host's cost.

    Raises:
        ValueError: If the config has an unknown name, or no value gives a published figure.
    """
    published = list(fit.read_figures())
    server = Server.of(cfg, published)
    predicted = list(server.predicted(published))
    simulated = list(_simulated(cfg, server, published))
    kinds = {"published": published, "predicted": predicted, "simulated": simulated}
    rows = [
        _row(kind, one, ranking.alone_s(server.workloads[one.model]), server.host(one))
        for kind, figures in kinds.items()
        for one in figures
    ]
    claims = list(_claims(cfg, server, published, predicted, simulated))
    return Report(claims, [*rows, *_measured(siblings)], _picture(published, predicted))


# --- simulated and measured figures ---------------------------------------------------------------


def _simulated(cfg: DictConfig, server: Server, figures: Figures) -> Iterator[Figure]:
    """Yield scaling factors without host time: on all GPUs over PCIe, and on two over NVLink."""
    for one in figures:
        if one.is_of(PCIE, GPUS):
            network = server.network
        elif one.is_of(NVLINK, 2):
            network = networks_of(cfg, 2)[NVLINK]
        else:
            continue
        workload = _compressed(cfg, server.workloads[one.model], one.compressor, network)
        layerwise = fit.scaling(fit.LAYERWISE, workload, network)
        merged = layerwise if one.compressor == FP32 else _merged(workload, network)
        yield replace(one, pair=(layerwise, merged))


def _compressed(cfg: DictConfig, workload: Workload, name: str, network: Network) -> Workload:
    if name == FP32:
        return workload
    compressor = DGC(density=float(cfg.dgc_density)) if name == "dgc" else name
    return compressed(workload, compressor, device_of(cfg), network.world_size)


def _merged(workload: Workload, network: Network) -> float:
    """Return the largest scaling factor of tensors merged into two groups, over all cuts."""

    def cut_at(place: int) -> strategies.Strategy:
        def plan(tensors: Sequence[TensorSpec], world_size: int) -> BucketPlan:
            # `fuse_groups` puts the tensors before the cut into a second group.
            return fusion.fuse_groups("merged", tensors, world_size, [range(place, len(tensors))])

        in_two = strategies.planned(plan, all_reduces=True)
        return strategies.Strategy("merged", in_two, compresses="whole")

    places = range(1, len(workload.tensors))
    return max(fit.scaling(cut_at(place), workload, network) for place in places)


def _row(kind: str, one: Figure, compute_s: float, host: tuple[float, float | None]) -> Row:
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
            figure = Figure(name, num_ranks, alone["model"], compressor, pair)
            yield _row("measured", figure, float(alone["step_s"]), (saved_s / num_merged, None))


# --- claims ---------------------------------------------------------------------------------------


def _claims(
    cfg: DictConfig, server: Server, published: Figures, predicted: Figures, simulated: Figures
) -> Iterator[Claim]:
    """Yield all claims.

    Args:
        cfg: Config of the recipe, with the values to compare fitted ones with.
        server: Fitted server.
        published: Published figures of all networks, numbers of GPUs and models.
        predicted: Figures that the host times fitted to ResNet-50 predict.
        simulated: Figures simulated without host time.
    """
    dgc = _found(published, PCIE, GPUS, FITTED, "dgc")
    other = _found(published, PCIE, GPUS, OTHERS[0], "dgc")
    what, theirs = f"DGC on {FITTED}, {GPUS} GPUs, PCIe", f"{GAIN}x (digitised {dgc.percent})"
    here = f"{_shown(_found(simulated, PCIE, GPUS, FITTED, 'dgc'))} by kernels and bytes alone"
    costs_s = server.host(dgc).per_tensor_s, server.host(other).per_tensor_s
    yield _host_claim(what, theirs, here, costs_s, f"by {other.model}")
    for model in OTHERS:
        yield _model_claim(model, server, published, predicted)
    fewer = _found(published, PCIE, 2, FITTED, "dgc")
    what, here = f"DGC on {FITTED}, 2 GPUs, PCIe", f"{_shown(dgc)} with the host of {GPUS} GPUs"
    costs_s = server.host(fewer).per_tensor_s, server.host(dgc).per_tensor_s
    yield _host_claim(what, _shown(fewer), here, costs_s, f"by {GPUS} GPUs")
    yield _topk_claim(server, published, simulated, float(cfg.topk_then_s))
    yield from _nvlink_claims(cfg, server, published, simulated)


def _found(figures: Figures, network: str, num_gpus: int, model: str, compressor: str) -> Figure:
    own = (one for one in figures if one.is_of(network, num_gpus, model))
    return next(one for one in own if one.compressor == compressor)


def _shown(one: Figure) -> str:
    return f"{one.gain:.2f}x ({one.percent})"


def _host_claim(
    what: str, published: str, here: str, per_tensor_s: tuple[float, float], source: str
) -> Claim:
    fitted, other = per_tensor_s
    must = f"a host takes {1e3 * fitted:.2f} ms a tensor"
    checked = check(f"{1e3 * other:.2f} ms {source}", fitted, other)
    return Claim(what, published, here, "simulated", must, **checked)


def _model_claim(model: str, server: Server, published: Figures, predicted: Figures) -> Claim:
    """Return the claim on all compressors on a model to which their host times were not fitted."""
    off, apart, gains, num_close = [], [], [], 0
    own = [one for one in predicted if one.model == model]
    for here in own:
        there = _found(published, PCIE, GPUS, model, here.compressor)
        off += [100 * abs(one - two) for one, two in zip(here.pair, there.pair, strict=True)]
        apart.append(max(here.gain / there.gain, there.gain / here.gain))
        gains.append(there.gain)
        costs = server.host(here).per_tensor_s / server.host(there).per_tensor_s
        num_close += 1 / PLAUSIBLE <= costs <= PLAUSIBLE
    what, gain = f"{len(own)} compressors on {model}", f"{min(gains):.2f}x to {max(gains):.2f}x"
    found = f"{fmean(off):.0f} points off on average, {max(off):.0f} at most"
    must, is_close = f"a host takes what it does in {FITTED}", max(apart) <= PLAUSIBLE
    close = f"{num_close} of {len(own)} costs a tensor within {PLAUSIBLE}x"
    checked = f"gains up to {max(apart):.2f}x off; {close}"
    return Claim(what, gain, found, "simulated", must, checked, "yes" if is_close else "no")


def _topk_claim(server: Server, published: Figures, simulated: Figures, then_s: float) -> Claim:
    own, here = (_found(of, PCIE, GPUS, FITTED, "topk") for of in (published, simulated))
    number_s = 4 * server.host(own).per_byte_s
    what, found = f"top-k on {FITTED} gains little", f"{_shown(here)} with today's torch.topk"
    must = f"top-k takes {1e9 * number_s:.1f} ns a number"
    checked = check(f"{1e9 * then_s:.1f} ns measured in 2019", number_s, then_s)
    return Claim(what, _shown(own), found, "simulated", must, **checked)


def _nvlink_claims(
    cfg: DictConfig, server: Server, published: Figures, simulated: Figures
) -> Iterator[Claim]:
    """Yield two explanations of FP32's waits on NVLink: host time for each tensor, or a cycle."""
    figure, here = (
        f"{100 * _found(figures, NVLINK, 2, FITTED, 'fp16').pair[1]:.0f} % merged,"
        f" FP32 {100 * _found(figures, NVLINK, 2, FITTED, FP32).pair[0]:.0f} %"
        for figures in (published, simulated)
    )
    theirs, other = (_found(published, NVLINK, 2, model, FP32) for model in (FITTED, OTHERS[0]))
    a_tensor_s, others_s = (server.host(one).per_tensor_s for one in (theirs, other))
    what, must = f"FP16 on {FITTED}, 2 GPUs, NVLink", f"FP32 takes a host {1e6 * a_tensor_s:.0f} us"
    checked = check(f"{1e6 * others_s:.0f} us by {other.model}", a_tensor_s, others_s)
    yield Claim(what, figure, here, "simulated", f"{must} a tensor", **checked)
    cycle_s, waits_s = float(cfg.cycle_s), server.waits_s(theirs)
    words = f"it is {1e3 * cycle_s:.1f} ms, MergeComp's {1e3 * cfg.mergecomp_cycle_s:.1f} ms"
    what, must = "the same by Horovod's cycle", f"FP32 waits {1e3 * waits_s:.1f} ms for it"
    yield Claim(what, figure, here, "simulated", must, **check(words, waits_s, cycle_s))


# --- picture --------------------------------------------------------------------------------------


def _picture(published: Figures, predicted: Figures) -> Any:
    where = f"{GPUS} GPUs over PCIe"
    shares = {
        (f"{one.model}, {where}", f"{scheme}, {kind}", one.compressor): 100 * one.pair[place]
        for place, scheme in enumerate(("layer by layer", "merged"))
        for kind, figures in (("published", published), ("predicted", predicted))
        for one in figures
        if one.is_of(PCIE, GPUS) and one.model in OTHERS and one.compressor != FP32
    }
    return grouped_bars(shares, "%", f"Scaling factor: published, and predicted from {FITTED}", 100)
