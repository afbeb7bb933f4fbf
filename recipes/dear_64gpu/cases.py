"""Cases to compare: every model on every network, under the paper's baselines and DeAR."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from omegaconf import DictConfig

from lightning_dear.apps.recipe.simulated import listed, networks_of, progress, workload_of
from lightning_dear.simulator import Link, Network, Workload, simulate, strategies
from lightning_dear.simulator.strategies import Builder, as_published, horovod_program
from lightning_dear.workloads.replay.profile import ModelProfile, load_profile

UNFUSED = "dear_paper, nothing fused"
WITH_BUFFERS = "ddp, with module buffers"


@dataclass(frozen=True)
class Case:
    """A model on a network.

    Attributes:
        network_name: Name of the cluster, and how the network differs from it.
        network: Costs of messages.
        workload: Model to train.
        buffers_s: Seconds for which DDP's forward waits for module buffers.
        caps_mb: Bucket caps, in MiB, from which DeAR chooses the best.
        steps_s: Name of a strategy or variant -> seconds of a step.
    """

    network_name: str
    network: Network
    workload: Workload
    buffers_s: float
    caps_mb: tuple[float, ...]
    steps_s: Mapping[str, float]

    @property
    def rate(self) -> float:
        """Rate of a link between nodes, in bit/s."""
        return 8 / self.network.between.beta_s

    @property
    def dear_s(self) -> float:
        """Seconds of DeAR's step with its best cap."""
        return min(self.steps_s[_capped(cap_mb)] for cap_mb in self.caps_mb)

    def gain(self, *others: str) -> float:
        """Return the fastest of `others`' step time over DeAR's with its best cap, minus 1."""
        return min(self.steps_s[other] for other in others) / self.dear_s - 1

    def step_s(self, build: Builder, network: Network | None = None) -> float:
        """Simulate a step and return its seconds. None means the case's own network."""
        network = network or self.network
        return simulate(build(self.workload, network)).step_s

    def tuned_s(self, network: Network) -> float:
        """Return the seconds of DeAR's step with its best cap on another network."""
        return min(self.step_s(as_published(cap_mb), network) for cap_mb in self.caps_mb)


def cases_of(cfg: DictConfig) -> Iterator[Case]:
    """Yield all cases of the config, simulated. Shows progress on stderr.

    Raises:
        ValueError: If the config has an unknown name.
    """
    builders, networks = _builders(cfg), _networks(cfg)
    pairs = [(name, *model) for name in networks for model in _models(cfg)]
    for name, profile, workload in progress(pairs, "simulating"):
        network = networks[name]
        buffers_s, caps_mb = _buffers_s(profile, network), tuple(map(float, cfg.caps_mb))
        case = Case(name, network, workload, buffers_s, caps_mb, {})
        steps_s = {way: case.step_s(build) for way, build in builders.items()}
        if "ddp" in steps_s:
            steps_s[WITH_BUFFERS] = steps_s["ddp"] + buffers_s
        yield replace(case, steps_s=steps_s)


def _builders(cfg: DictConfig) -> dict[str, Builder]:
    """Return name of a strategy or variant -> builder of its step."""
    names = *listed(cfg, "baselines"), *listed(cfg, "ours")
    made = {name: strategies.resolve_strategy(name).build for name in names}
    for cycle_ms in cfg.horovod.cycles_ms:
        made[f"horovod, {cycle_ms:g} ms"] = partial(horovod_program, cycle_s=cycle_ms / 1e3)
    for fusion_mb in cfg.horovod.fusion_mb:
        made[f"horovod, {fusion_mb:g} MB"] = partial(horovod_program, fusion_mb=fusion_mb)
    made |= {_capped(cap_mb): as_published(float(cap_mb)) for cap_mb in cfg.caps_mb}
    return made | {UNFUSED: as_published(None)}


def _capped(cap_mb: float) -> str:
    return f"dear_paper, {cap_mb:g} MB"


def _networks(cfg: DictConfig) -> dict[str, Network]:
    """Return name -> network of each cluster, and variants of it.

    If NCCL could use trees, there is a variant with rings only; and one of that with several NICs,
    if the config has their number.
    """
    networks = {}
    for name, network in networks_of(cfg, cfg.world_size).items():
        networks[name] = network
        if network.algorithm == "nccl":
            networks[f"{name}, rings"] = rings = replace(network, algorithm="ring")
            if num_nics := cfg.nics.get(name):
                link = Link(network.between.alpha_s, network.between.beta_s / num_nics)
                networks[f"{name}, rings, {num_nics} NICs"] = replace(rings, between=link)
    return networks


def _models(cfg: DictConfig) -> Iterator[tuple[ModelProfile, Workload]]:
    """Yield each profile with its workload, and again with public seconds if there are any."""
    for name in listed(cfg, "models"):
        profile = load_profile(name)
        yield profile, workload_of(profile, float(cfg.compute_factor))
        if (public_s := cfg.public_compute_s.get(name)) is not None:
            workload = workload_of(profile, public_s / (profile.forward_s + profile.backward_s))
            yield profile, replace(workload, name=f"{name}, public speed")


def _buffers_s(profile: ModelProfile, network: Network) -> float:
    """Return the seconds of DDP's two broadcasts: BatchNorm statistics, and counts of batches.

    A broadcast passes all ranks, and costs as much as a half of a ring all-reduce.
    """
    shapes = [layer.shapes for layer in profile.layers]
    if not any(len(shape) > 2 for owned in shapes for shape in owned):
        return 0.0  # Without convolutions these are layer norms, which have none.
    widths = [owned[0][0] for owned in shapes if len(owned) == 2 and owned[0] == owned[1]]
    return network.half_s(2 * 4 * sum(widths)) + network.half_s(8 * len(widths))
