"""What FP32's published scaling factors say of a network; nothing of compressors is looked at."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from omegaconf import DictConfig, OmegaConf

from lightning_dear.apps.recipes.mergecomp_published import fp32_on_pcie
from lightning_dear.apps.recipes.simulated import networks_of
from lightning_dear.simulator import Network, Workload
from lightning_dear.simulator.ranking import Conditions, alone_s
from lightning_dear.simulator.strategies import resolve_strategy
from lightning_dear.workloads.replay.planned import planned
from lightning_dear.workloads.replay.profile import load_profile

ONE_STEP = Conditions(num_steps=1)
"""All steps are alike."""

_RATES_S, _LENGTHS_S = (1e-12, 1e-6), (1e-4, 1e2)
"""Between which a byte's seconds are looked for, and those of forward and backward."""

_HALVINGS = 30


@dataclass(frozen=True)
class Fitted:
    """A network, and what GPUs compute there.

    Attributes:
        name: The network's.
        cluster: What it has but for its rate.
        model: Whose FP32 the rate was fitted to.
        beta_s: Seconds for a byte.
        seconds: Model -> seconds of forward and backward, where others than in the config.
        assumed: Model -> scaling factor of FP32 with the config's seconds, per cent.
    """

    name: str
    cluster: str
    model: str
    beta_s: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    assumed: Mapping[str, float] = field(default_factory=dict)

    def network(self, world_size: int) -> Network:
        """Return the network of so many GPUs.

        Raises:
            ValueError: If the cluster is unknown, or they do not fit into one of its nodes.
        """
        asked = OmegaConf.create({"clusters": [self.cluster]})
        plain = networks_of(asked, world_size)[self.cluster]
        if plain.num_nodes > 1 or plain.within is None:
            raise ValueError(f"as_published.cluster={self.cluster} must hold all GPUs in one node.")
        return replace(plain, within=replace(plain.within, beta_s=self.beta_s))


def fitted(cfg: DictConfig) -> Fitted | None:
    """Return the network at whose rate FP32 scales as published; None if none is asked for.

    Raises:
        ValueError: If there is no such rate, or no such figure.
    """
    asked = cfg.as_published
    if asked is None or cfg.get("cluster") is not None:
        return None
    model, world_size = str(asked.model), max(world_sizes(cfg))
    made = Fitted(str(asked.name), str(asked.cluster), model)
    if model not in cfg.models:
        raise ValueError(f"as_published.model={model} must be among models.")
    workload = workload_of(model, cfg.models[model])

    def slowed(beta_s: float) -> float:
        return -fp32_scaling(workload, replace(made, beta_s=beta_s).network(world_size))

    made = replace(made, beta_s=_solved(slowed, -_published(model), *_RATES_S))
    network = made.network(world_size)
    others = [name for name in cfg.models if name != model and fp32_on_pcie(name) is not None]
    return replace(
        made,
        seconds={name: _seconds_of(name, network) for name in others if asked.fits_seconds},
        assumed={
            name: fp32_scaling(workload_of(name, seconds), network)
            for name, seconds in cfg.models.items()
        },
    )


def world_sizes(cfg: DictConfig) -> list[int]:
    """Return the numbers of GPUs.

    Raises:
        ValueError: If they are no list, or one is below 2.
    """
    sizes = cfg.world_sizes
    if isinstance(sizes, int) or not sizes or min(sizes) < 2:
        raise ValueError(f"world_sizes must be a list of 2 and more, such as [2,8]; got {sizes}.")
    return [int(size) for size in sizes]


def workload_of(model: str, seconds: float) -> Workload:
    """Return a profile's model, of which forward and backward take so long together.

    Raises:
        ValueError: If there is no such profile.
    """
    profile = load_profile(model).with_compute(float(seconds))
    return Workload(profile.name, *planned(profile))


def fp32_scaling(workload: Workload, network: Network) -> float:
    """Per cent: one GPU's step over that with an all-reduce for each tensor."""
    step = ONE_STEP.step(resolve_strategy("wfbp"), workload, network)
    return 100 * alone_s(workload) / step.step_s


def _seconds_of(model: str, network: Network) -> float:
    def scaled(seconds: float) -> float:
        return fp32_scaling(workload_of(model, seconds), network)

    return _solved(scaled, _published(model), *_LENGTHS_S)


def _published(model: str) -> float:
    figure = fp32_on_pcie(model)
    if figure is None:
        raise ValueError(f"FP32 has no published figure for {model}; set as_published=null.")
    return figure


def _solved(rising: Callable[[float], float], goal: float, low: float, high: float) -> float:
    """Where a function has a value, between two positive numbers."""
    if not rising(low) <= goal <= rising(high):
        raise ValueError(f"FP32 scales by {abs(goal):g} % nowhere between {low:g} and {high:g} s.")
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if rising(middle) < goal else (low, middle)
    return high
