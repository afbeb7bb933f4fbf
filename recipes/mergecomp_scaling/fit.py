"""What FP32's published scaling factors say of a network; nothing of compressors is looked at."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from omegaconf import DictConfig, OmegaConf

from lightning_dear.apps.recipe.mergecomp_published import FP32, fp32_sizes, published
from lightning_dear.apps.recipe.simulated import listed, networks_of
from lightning_dear.simulator import Network, Workload
from lightning_dear.simulator.ranking import alone_s, predicted
from lightning_dear.simulator.strategies import resolve_strategy
from lightning_dear.workloads.replay.planned import planned
from lightning_dear.workloads.replay.profile import load_profile

_RATES_S, _LENGTHS_S = (1e-12, 1e-6), (1e-4, 1e2)
"""Between which a byte's seconds are looked for, and those of forward and backward."""

_HALVINGS = 30


@dataclass(frozen=True)
class Fitted:
    """A network, and what GPUs compute there.

    Attributes:
        name: The network's.
        cluster: What it has but for its rate; whose figures are fitted to.
        world_size: GPUs in these figures.
        model: Whose FP32 the rate was fitted to.
        beta_s: Seconds for a byte.
        seconds: Model -> seconds of forward and backward, where others than in the config.
        assumed: Model -> scaling factor of FP32 with the config's seconds, per cent.
    """

    name: str
    cluster: str
    world_size: int
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
    model, computed = str(asked.model), computed_s(cfg, [str(asked.model)])
    made = Fitted(str(asked.name), str(asked.cluster), max(world_sizes(cfg)), model)
    if made.name in listed(cfg, "clusters"):
        raise ValueError(f"as_published.name={made.name} must not be one of clusters.")
    goal = _published(made, model, "as_published=null")
    workload = workload_of(model, computed[model])

    def slowed(beta_s: float) -> float:
        return -fp32_scaling(workload, replace(made, beta_s=beta_s).network(made.world_size))

    made = replace(made, beta_s=_solved(slowed, -goal, *_RATES_S))
    shown, network = models_of(cfg), made.network(made.world_size)
    assumed = {one: fp32_scaling(workload_of(one, own_s), network) for one, own_s in shown.items()}
    return replace(made, seconds=_seconds(made, shown, asked.fits_seconds), assumed=assumed)


def _seconds(made: Fitted, shown: Iterable[str], is_asked_for: bool) -> dict[str, float]:
    """Of the other models, those that have figures: seconds with which they scale as published."""
    others = [name for name in shown if name != made.model and fp32_sizes(made.cluster, name)]
    return {name: _seconds_of(name, made) for name in others if is_asked_for}


def models_of(cfg: DictConfig) -> dict[str, float]:
    """Return the models that are asked for, and the seconds of each.

    Raises:
        ValueError: If they are no list, or one has no seconds in the config.
    """
    return computed_s(cfg, listed(cfg, "models"))


def computed_s(cfg: DictConfig, models: Sequence[str]) -> dict[str, float]:
    """Return the seconds of `cfg.compute_s` of some models.

    Raises:
        ValueError: If one has none.
    """
    for name in models:
        if name not in cfg.compute_s:
            raise ValueError(
                f"Model {name!r} has no seconds in compute_s, which has those of:"
                f" {', '.join(map(str, cfg.compute_s))}; +compute_s.{name}=SECONDS adds them."
            )
    return {name: float(cfg.compute_s[name]) for name in models}


def world_sizes(cfg: DictConfig) -> list[int]:
    """Return the numbers of GPUs; one alone, if the command line gives the cluster's size.

    Raises:
        ValueError: If they are no list, or one is below 2.
    """
    sizes = cfg.world_sizes
    if isinstance(sizes, int) or not sizes or min(sizes) < 2:
        raise ValueError(f"world_sizes must be a list of 2 and more, such as [2,8]; got {sizes}.")
    asked = [int(size) for size in sizes]
    if cfg.get("cluster") is None:
        return asked
    found = (one for size in asked for one in networks_of(cfg, size).values())
    return list(dict.fromkeys(network.world_size for network in found))


def workload_of(model: str, seconds: float) -> Workload:
    """Return a profile's model, of which forward and backward take so long together.

    They keep the ratio that the profile has.

    Raises:
        ValueError: If there is no such profile.
    """
    profile = load_profile(model)
    return Workload(profile.name, *planned(profile.with_compute(seconds)))


def fp32_scaling(workload: Workload, network: Network) -> float:
    """Per cent: one GPU's step over that with an all-reduce for each tensor."""
    row = predicted(resolve_strategy("wfbp"), workload, network)
    return 100 * row.efficiency(alone_s(workload))


def _seconds_of(model: str, made: Fitted) -> float:
    network = made.network(made.world_size)

    def scaled(seconds: float) -> float:
        return fp32_scaling(workload_of(model, seconds), network)

    goal = _published(made, model, "as_published.fits_seconds=false")
    return _solved(scaled, goal, *_LENGTHS_S)


def _published(made: Fitted, model: str, remedy: str) -> float:
    pair = published(made.cluster, made.world_size, model, FP32)
    if pair is not None:
        return pair[0]
    sizes = ", ".join(map(str, fp32_sizes(made.cluster, model)))
    raise ValueError(
        f"FP32 of {model} on {made.world_size} GPUs has no published figure for {made.cluster}; set"
        f" {remedy}" + (f", or let the largest of world_sizes be one of {sizes}." if sizes else ".")
    )


def _solved(rising: Callable[[float], float], goal: float, low: float, high: float) -> float:
    """Where a function has a value, between two positive numbers."""
    if not rising(low) <= goal <= rising(high):
        raise ValueError(f"FP32 scales by {abs(goal):g} % nowhere between {low:g} and {high:g} s.")
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if rising(middle) < goal else (low, middle)
    return high
