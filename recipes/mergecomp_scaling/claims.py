"""Claims on MergeComp: published figures, host times that explain them, and independent checks."""

from collections.abc import Iterator
from statistics import fmean

from omegaconf import DictConfig

from lightning_dear.apps.recipe.report import PLAUSIBLE, Claim, check

from .fit import FITTED, FP32, GPUS, NVLINK, OTHERS, PCIE, Figure, Figures, Server

GAIN = 3.83
"""Largest speed-up of scheduled over layer-by-layer compression, from the paper's abstract."""


def claims_of(
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
    yield _host_claim(
        f"DGC on {FITTED}, {GPUS} GPUs, PCIe",
        f"{GAIN}x (digitised {dgc.percent})",
        f"{_shown(_found(simulated, PCIE, GPUS, FITTED, 'dgc'))} by kernels and bytes alone",
        (server.host(dgc).per_tensor_s, server.host(other).per_tensor_s),
        f"by {other.model}",
    )
    for model in OTHERS:
        yield _model_claim(model, server, published, predicted)
    fewer = _found(published, PCIE, 2, FITTED, "dgc")
    yield _host_claim(
        f"DGC on {FITTED}, 2 GPUs, PCIe",
        _shown(fewer),
        f"{_shown(dgc)} with the host of {GPUS} GPUs",
        (server.host(fewer).per_tensor_s, server.host(dgc).per_tensor_s),
        f"by {GPUS} GPUs",
    )
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
    return Claim(
        f"{len(own)} compressors on {model}",
        f"{min(gains):.2f}x to {max(gains):.2f}x",
        f"{fmean(off):.0f} points off on average, {max(off):.0f} at most",
        "simulated",
        f"a host takes what it does in {FITTED}",
        f"gains up to {max(apart):.2f}x off; {num_close} of {len(own)} costs a tensor within"
        f" {PLAUSIBLE}x",
        "yes" if max(apart) <= PLAUSIBLE else "no",
    )


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
