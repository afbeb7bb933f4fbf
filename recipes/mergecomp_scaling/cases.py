"""Scaling factors of models with compressors on networks, simulated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig

from lightning_dear.apps.plan.config import compressed
from lightning_dear.apps.recipe.mergecomp_fit import (
    Fitted,
    models_of,
    workload_of,
    world_sizes,
)
from lightning_dear.apps.recipe.mergecomp_published import FP32, published
from lightning_dear.apps.recipe.mergecomp_schemes import BEST_GROUPS, BY_NAME, LAYERWISE, TWO_GROUPS
from lightning_dear.apps.recipe.simulated import listed, networks_of
from lightning_dear.compression import resolve_compressor
from lightning_dear.planning import CodecCost, CodecCosts, Linear
from lightning_dear.simulator import Network, Workload
from lightning_dear.simulator.ranking import alone_s, predicted
from lightning_dear.studies.device_costs import Device

SLOW_TOPK = "topk_then"
"""`topk` with `topk_then_s` more for each number."""


@dataclass(frozen=True)
class Cell:
    """One model with one compressor on one network.

    Attributes:
        network: A cluster's name, or that of the fitted one.
        figures_of: The cluster whose published figures are of the same; None: nobody's are, as
            where the cluster was given on the command line.
        world_size: GPUs.
        model: A profile's name.
        compressor: Its name, or `FP32`.
        kernel_s: What starting a kernel is taken to last, seconds.
        alone_s: Seconds of a step of one GPU.
        steps_s: Scheme -> seconds of a step.
    """

    network: str
    figures_of: str | None
    world_size: int
    model: str
    compressor: str
    kernel_s: float
    alone_s: float
    steps_s: Mapping[str, float]

    def scaling(self, scheme: str) -> float:
        """The scaling factor, per cent: one GPU's step over this one."""
        return 100 * self.alone_s / self.steps_s[scheme]

    def gain(self, scheme: str, over: str) -> float:
        """How many times as fast as `over` a scheme is."""
        return self.steps_s[over] / self.steps_s[scheme]

    def as_row(self) -> dict[str, Any]:
        """Return its figures, for a file."""
        names = "network", "world_size", "model", "compressor", "kernel_s", "alone_s"
        own = {name: getattr(self, name) for name in names}
        return {**own, **{f"{name}_s": self.steps_s.get(name) for name in BY_NAME}}


@dataclass(frozen=True)
class _Case:
    """What is simulated with one compressor after the other."""

    name: str
    figures_of: str | None
    network: Network
    workload: Workload
    kernel_s: float

    def cell(self, cfg: DictConfig, compressor: str, schemes: Sequence[str]) -> Cell:
        device = Device(self.kernel_s, float(cfg.device.bytes_per_s))
        workload = _compressed(cfg, self.workload, compressor, device, self.network.world_size)
        steps_s = {
            name: predicted(BY_NAME[name], workload, self.network).step.step_s for name in schemes
        }
        own = self.network.world_size, workload.name, compressor, self.kernel_s
        return Cell(self.name, self.figures_of, *own, alone_s(workload), steps_s)


def cells(cfg: DictConfig, fit: Fitted | None) -> Iterator[Cell]:
    """Every compressor with every model on every network.

    On fewer GPUs than most, of models outside `all_on_fewer` only what has published figures.
    """
    sizes = world_sizes(cfg)
    for world_size in sizes:
        is_most = world_size == max(sizes)
        schemes = [name for name in BY_NAME if is_most or name != BEST_GROUPS]
        for case in _cases(cfg, fit, world_size, float(cfg.device.kernel_s)):
            model = case.workload.name
            has_all = is_most or model in cfg.all_on_fewer
            for compressor in [FP32, *listed(cfg, "compressors")]:
                if has_all or published(case.figures_of, world_size, model, compressor):
                    yield case.cell(cfg, compressor, schemes)


def kernel_cells(cfg: DictConfig, fit: Fitted | None) -> Iterator[Cell]:
    """The first model on the last network, in their scheme; for each of `cfg.kernels_s`."""
    for kernel_s in cfg.kernels_s:
        cases = list(_cases(cfg, fit, max(world_sizes(cfg)), float(kernel_s)))
        case = next(one for one in cases if one.name == cases[-1].name)
        for compressor in listed(cfg, "compressors"):
            yield case.cell(cfg, compressor, [LAYERWISE, TWO_GROUPS])


def _cases(
    cfg: DictConfig, fit: Fitted | None, world_size: int, kernel_s: float
) -> Iterator[_Case]:
    models, is_given = models_of(cfg), cfg.get("cluster") is not None
    for name, network in networks_of(cfg, world_size).items():
        figures_of = None if is_given else name
        for model in models.items():
            yield _Case(name, figures_of, network, workload_of(*model), kernel_s)
    if fit is not None:
        network = fit.network(world_size)
        for model in {**models, **fit.seconds}.items():
            yield _Case(fit.name, fit.cluster, network, workload_of(*model), kernel_s)


def _compressed(
    cfg: DictConfig, workload: Workload, name: str, device: Device, world_size: int
) -> Workload:
    if name == FP32:
        return workload
    known = "topk" if name == SLOW_TOPK else name
    made = resolve_compressor(known)
    options: Any = cfg.options.get(known, {})
    encoded = compressed(workload, type(made)(**options) if made else known, device, world_size)
    if name != SLOW_TOPK or encoded.whole_codecs is None:
        return encoded
    more_s = float(cfg.topk_then_s)
    return replace(
        encoded,
        codecs=_slower(encoded.codecs, more_s),
        whole_codecs=_slower(encoded.whole_codecs, more_s),
    )


def _slower(codecs: CodecCosts, more_s: float) -> CodecCosts:
    cost: CodecCost = codecs.compressed
    shard = cost.encode_shard
    if shard != Linear():
        shard = replace(shard, beta=shard.beta + more_s)
    encode = replace(cost.encode, beta=cost.encode.beta + more_s)
    return replace(codecs, compressed=replace(cost, encode=encode, encode_shard=shard))
