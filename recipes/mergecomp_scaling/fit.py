"""Fits host times, per tensor and per byte, to MergeComp's published scaling factors.

Compressors' host times are fitted to ResNet-50 only. Of other models only FP32's figures are used.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig

from lightning_dear.apps.recipe.simulated import fitted, networks_of, workload_of
from lightning_dear.simulator import Link, Network, Workload, ranking, strategies
from lightning_dear.studies.files import read_rows
from lightning_dear.workloads.replay.profile import load_profile

Pair = tuple[float, float]
"""Scaling factors, 0 to 1: layer by layer, and scheduled by MergeComp."""

FP32 = "fp32"
FITTED, OTHERS = "resnet50", ("resnet101", "mask_rcnn")
PCIE, NVLINK = "pcie_8gpu", "nvlink_8gpu"
GPUS = 8
GROUPS = 2
"""Number of groups into which MergeComp merges all tensors."""

LAYERWISE = strategies.resolve_strategy("wfbp")

_TOLERANCE = 1e-9
_BETAS_S, _LENGTHS_S = (1e-12, 1e-6), (1e-4, 1e2)
"""Least and largest values to try of a link's seconds per byte, and of forward and backward."""


@dataclass(frozen=True)
class Figure:
    """A pair of published scaling factors.

    Attributes:
        network: Name of our cluster that stands for the paper's.
        num_gpus: Number of GPUs, all in one server.
        model: Name of a profile.
        compressor: Name of a compressor, or `FP32`.
        pair: The two factors. FP32 is not scheduled, and both are the same.
    """

    network: str
    num_gpus: int
    model: str
    compressor: str
    pair: Pair

    @property
    def gain(self) -> float:
        """Speed-up of scheduled over layer-by-layer compression."""
        return self.pair[1] / self.pair[0]

    @property
    def percent(self) -> str:
        """The pair as text, for people."""
        return f"{100 * self.pair[0]:.0f}->{100 * self.pair[1]:.0f} %"

    def is_of(self, network: str, num_gpus: int, model: str | None = None) -> bool:
        """Whether the figure has this network and number of GPUs, and this model unless None."""
        return (self.network, self.num_gpus) == (network, num_gpus) and model in (None, self.model)


Figures = Sequence[Figure]


def read_figures() -> Iterator[Figure]:
    """Yield all published figures; they were digitised from plots, to +-0.01."""
    for row in read_rows(Path(__file__).with_name("published.csv")):
        percents = float(row["layerwise"]), float(row["scheduled"] or row["layerwise"])
        pair, num_gpus = (percents[0] / 100, percents[1] / 100), int(row["num_gpus"])
        yield Figure(row["network"], num_gpus, row["model"], row["compressor"], pair)


class Host(NamedTuple):
    """Seconds of a step beyond computing with one compressor, from whatever cause.

    Attributes:
        per_tensor_s: Seconds for each tensor that is compressed and sent by itself.
        per_byte_s: Seconds for each byte of the gradients, merged or not.
    """

    per_tensor_s: float
    per_byte_s: float

    def scaling(self, workload: Workload) -> Pair:
        """Return the two scaling factors of a model with this host."""
        scheduled_s = ranking.alone_s(workload) + self.per_byte_s * workload.nbytes
        layerwise_s = scheduled_s + self.per_tensor_s * (len(workload.tensors) - GROUPS)
        return ranking.alone_s(workload) / layerwise_s, ranking.alone_s(workload) / scheduled_s


@dataclass(frozen=True)
class Server:
    """The paper's server, as fitted to FP32's figures.

    Attributes:
        network: `PCIE` with 8 GPUs, with the link's rate at which ResNet-50 in FP32 has its
            published scaling factor.
        workloads: Model -> workload whose compute time gives its published factor in FP32.
    """

    network: Network
    workloads: Mapping[str, Workload]

    @classmethod
    def of(cls, cfg: DictConfig, figures: Figures) -> "Server":
        """Fit a server to published figures.

        Raises:
            ValueError: If no rate, or no compute time, gives a published figure.
        """
        plain = [one for one in figures if one.is_of(PCIE, GPUS) and one.compressor == FP32]
        goals = {one.model: one.pair[0] for one in plain}
        first, nominal = computing(FITTED, float(cfg.compute_s)), networks_of(cfg, GPUS)[PCIE]

        def at(beta_s: float) -> Network:
            return replace(nominal, within=Link(nominal.outer_link.alpha_s, beta_s))

        def scaling_at(beta_s: float) -> float:
            return scaling(LAYERWISE, first, at(beta_s))

        words = f"FP32's scaling factor of {FITTED}"
        network = at(fitted(scaling_at, goals[FITTED], _BETAS_S, words, _TOLERANCE))
        others = {model: _scaled_to(goals[model], model, network) for model in OTHERS}
        return cls(network, {FITTED: first, **others})

    def waits_s(self, one: Figure) -> float:
        """Return the seconds of a layer-by-layer step beyond computing."""
        compute_s = ranking.alone_s(self.workloads[one.model])
        return compute_s / one.pair[0] - compute_s

    def host(self, one: Figure) -> Host:
        """Return the host that gives a figure: the inverse of `Host.scaling`.

        All of FP32's waits count as time per tensor.
        """
        workload = self.workloads[one.model]
        if one.compressor == FP32:
            return Host(self.waits_s(one) / len(workload.tensors), 0.0)
        layerwise_s, scheduled_s = (ranking.alone_s(workload) / share for share in one.pair)
        per_tensor_s = (layerwise_s - scheduled_s) / (len(workload.tensors) - GROUPS)
        return Host(per_tensor_s, (scheduled_s - ranking.alone_s(workload)) / workload.nbytes)

    def predicted(self, figures: Figures) -> Iterator[Figure]:
        """Yield the other models' scaling factors, predicted from the hosts fitted to ResNet-50."""
        for one in figures:
            if one.is_of(PCIE, GPUS, FITTED) and one.compressor != FP32:
                host = self.host(one)
                for model in OTHERS:
                    yield replace(one, model=model, pair=host.scaling(self.workloads[model]))


def _scaled_to(goal: float, model: str, network: Network) -> Workload:
    """Return a model with the compute time with which its FP32 has the scaling factor `goal`."""

    def scaling_with(seconds: float) -> float:
        return scaling(LAYERWISE, computing(model, seconds), network)

    words = f"FP32's scaling factor of {model}"
    return computing(model, fitted(scaling_with, goal, _LENGTHS_S, words, _TOLERANCE))


def computing(model: str, seconds: float) -> Workload:
    """Return a profile's model, whose forward and backward together take `seconds`."""
    profile = load_profile(model)
    return workload_of(profile, seconds / (profile.forward_s + profile.backward_s))


def scaling(strategy: strategies.Strategy, workload: Workload, network: Network) -> float:
    """Return a simulated scaling factor, 0 to 1: one GPU's step alone over that of all GPUs."""
    return ranking.alone_s(workload) / ranking.predicted(strategy, workload, network).step.step_s
