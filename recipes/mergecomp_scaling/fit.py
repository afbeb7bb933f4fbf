"""What MergeComp's published scaling factors say of its hosts: seconds a tensor, seconds a byte.

Compressors are fitted to ResNet-50 alone; of other models only FP32's figures are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig

from lightning_dear.apps.recipe.report import read_rows
from lightning_dear.apps.recipe.simulated import fitted, networks_of, workload_of
from lightning_dear.simulator import Link, Network, Workload
from lightning_dear.simulator.ranking import alone_s, predicted
from lightning_dear.simulator.strategies import Strategy, resolve_strategy
from lightning_dear.workloads.replay.profile import load_profile

Pair = tuple[float, float]
"""Scaling factors, 0 to 1: layer by layer, and scheduled by MergeComp."""

FP32 = "fp32"
FITTED, OTHERS = "resnet50", ("resnet101", "mask_rcnn")
PCIE, NVLINK = "pcie_8gpu", "nvlink_8gpu"
GPUS = 8
GROUPS = 2
"""That MergeComp merges tensors into."""

LAYERWISE = resolve_strategy("wfbp")

_TOLERANCE = 1e-9
_BETAS_S, _LENGTHS_S = (1e-12, 1e-6), (1e-4, 1e2)
"""Between which a byte's seconds are looked for, and those of forward and backward."""


@dataclass(frozen=True)
class Figure:
    """A published scaling factor, or two.

    Attributes:
        network: The cluster of ours that stands for theirs.
        num_gpus: Of one server.
        model: A profile's name.
        compressor: Its name, or `FP32`.
        pair: What the figure shows; FP32 is not scheduled and has the same twice.
    """

    network: str
    num_gpus: int
    model: str
    compressor: str
    pair: Pair

    @property
    def gain(self) -> float:
        """How many times as fast as layer by layer it is when scheduled."""
        return self.pair[1] / self.pair[0]

    @property
    def percent(self) -> str:
        """The pair, for people."""
        return f"{100 * self.pair[0]:.0f}->{100 * self.pair[1]:.0f} %"

    def is_of(self, network: str, num_gpus: int, model: str | None = None) -> bool:
        """Whether it is of a network and so many GPUs; and of a model, if one is given."""
        own = self.network, self.num_gpus
        return own == (network, num_gpus) and model in (None, self.model)


Figures = Sequence[Figure]


def read_figures() -> list[Figure]:
    """Return all that were digitised, each +-0.01."""
    rows = read_rows(Path(__file__).with_name("published.csv"))
    return [
        Figure(
            row["network"],
            int(row["num_gpus"]),
            row["model"],
            row["compressor"],
            (float(row["layerwise"]) / 100, float(row["scheduled"] or row["layerwise"]) / 100),
        )
        for row in rows
    ]


class Host(NamedTuple):
    """What one compressor takes of a step beyond computing, whatever it is made of.

    Attributes:
        per_tensor_s: Seconds for each tensor that is compressed and sent by itself.
        per_byte_s: Seconds for each byte of the gradient, merged or not.
    """

    per_tensor_s: float
    per_byte_s: float

    @classmethod
    def of(cls, workload: Workload, pair: Pair) -> Host:
        """Return that under which a model scales so; the inverse of `scaling`."""
        layerwise_s, scheduled_s = (alone_s(workload) / one for one in pair)
        return cls(
            (layerwise_s - scheduled_s) / (len(workload.tensors) - GROUPS),
            (scheduled_s - alone_s(workload)) / workload.nbytes,
        )

    def scaling(self, workload: Workload) -> Pair:
        """Return how a model scales with it."""
        scheduled_s = alone_s(workload) + self.per_byte_s * workload.nbytes
        merged = len(workload.tensors) - GROUPS
        layerwise_s = scheduled_s + self.per_tensor_s * merged
        return alone_s(workload) / layerwise_s, alone_s(workload) / scheduled_s


@dataclass(frozen=True)
class Server:
    """Theirs, as far as FP32's figures tell.

    Attributes:
        network: `PCIE` with 8 GPUs, at the rate at which FP32 of ResNet-50 scales as published.
        workloads: Model -> what computes as long as makes its FP32 scale as published there.
    """

    network: Network
    workloads: Mapping[str, Workload]

    @classmethod
    def of(cls, cfg: DictConfig, figures: Figures) -> Server:
        """Fit it.

        Raises:
            ValueError: If no rate, or no length of a step, gives a figure.
        """
        plain = [one for one in figures if one.is_of(PCIE, GPUS) and one.compressor == FP32]
        goals = {one.model: one.pair[0] for one in plain}
        first, nominal = computing(FITTED, float(cfg.compute_s)), networks_of(cfg, GPUS)[PCIE]

        def at(beta_s: float) -> Network:
            return replace(nominal, within=Link(nominal.outer_link.alpha_s, beta_s))

        def scaling_at(beta_s: float) -> float:
            return scaling(LAYERWISE, first, at(beta_s))

        words = f"FP32's scaling factor of {FITTED}"
        network = at(fitted(scaling_at, goals[FITTED], *_BETAS_S, words, _TOLERANCE))
        others = {model: _scaled_to(goals[model], model, network) for model in OTHERS}
        return cls(network, {FITTED: first, **others})

    def waits_s(self, one: Figure) -> float:
        """Seconds of a step, layer by layer, that are no computing."""
        compute_s = alone_s(self.workloads[one.model])
        return compute_s / one.pair[0] - compute_s

    def host(self, one: Figure) -> Host:
        """Return the host with which a figure holds; all that FP32 waits for is by the tensor."""
        workload = self.workloads[one.model]
        if one.compressor == FP32:
            return Host(self.waits_s(one) / len(workload.tensors), 0.0)
        return Host.of(workload, one.pair)

    def predicted(self, figures: Figures) -> Iterator[Figure]:
        """Yield how the other models scale if compressors cost hosts what they do in ResNet-50."""
        for one in figures:
            if one.is_of(PCIE, GPUS, FITTED) and one.compressor != FP32:
                host = self.host(one)
                for model in OTHERS:
                    yield replace(one, model=model, pair=host.scaling(self.workloads[model]))


def _scaled_to(goal: float, model: str, network: Network) -> Workload:
    """Return a model that computes as long as makes its FP32 scale so."""

    def scaling_with(seconds: float) -> float:
        return scaling(LAYERWISE, computing(model, seconds), network)

    words = f"FP32's scaling factor of {model}"
    return computing(model, fitted(scaling_with, goal, *_LENGTHS_S, words, _TOLERANCE))


def computing(model: str, seconds: float) -> Workload:
    """Return a profile's model, of which forward and backward take so long together."""
    profile = load_profile(model)
    return workload_of(profile, seconds / (profile.forward_s + profile.backward_s))


def scaling(strategy: Strategy, workload: Workload, network: Network) -> float:
    """Return a simulated scaling factor, 0 to 1: one GPU's step over that of all of them."""
    return alone_s(workload) / predicted(strategy, workload, network).step.step_s
