"""DeAR's headline: up to 83 % and 15 % over the state of the art on 64 GPUs (arXiv 2302.12445)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

from omegaconf import DictConfig

from lightning_dear.apps.recipe.report import Claim, Report, Sibling, grouped_bars, is_plausible
from lightning_dear.apps.recipe.simulated import fitted, listed, networks_of, progress, workload_of
from lightning_dear.simulator import Link, Network, Workload, ranking, simulate, strategies
from lightning_dear.workloads.replay.profile import ModelProfile, load_profile

ETHERNET, INFINIBAND = 0.83, 0.15
"""Largest gains over other strategies on 64 GPUs with each network, from the paper's abstract."""

BOUND = 1 / 3
"""Largest possible gain of the schedule: f + max(b, c) is 4/3 of max(f + b, c) if c = f + b."""

TOLERANCE = 1e-3
"""Relative error of fitted values: the step jumps when a tensor falls into another cycle."""

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

    def step_s(self, build: strategies.Builder, network: Network | None = None) -> float:
        """Simulate a step and return its seconds. None means the case's own network."""
        network = network or self.network
        return simulate(build(self.workload, network)).step_s

    def tuned_s(self, network: Network) -> float:
        """Return the seconds of DeAR's step with its best cap on another network."""
        return min(self.step_s(strategies.as_published(cap_mb), network) for cap_mb in self.caps_mb)


Cases = Mapping[str, Sequence[Case]]
"""Name of a network -> its cases, one for each model."""


@dataclass(frozen=True)
class Assumption:
    """A quantity on which a gain depends.

    Attributes:
        gain: Function from a value of the quantity to DeAR's largest gain.
        between: Least and largest value to try.
        known: Value of the quantity from an independent source.
        words: Name of the quantity, unit for people, and factor from `known` to that unit.
        source: Source of `known`.
    """

    gain: Callable[[float], float]
    between: tuple[float, float]
    known: float
    words: tuple[str, str, float]
    source: str

    def claim(self, title: str, published: float, here: str) -> Claim:
        """Return the claim with the value of the quantity that makes it true."""
        what, unit, scale = self.words
        checked = f"{scale * self.known:.3g} {unit}, {self.source}"
        try:
            found = fitted(self.gain, published, self.between, "the gain", TOLERANCE)
            must, is_close = f"{what} {scale * found:.3g} {unit}", is_plausible(found, self.known)
        except ValueError:
            low, high = (scale * end for end in self.between)
            must, is_close = f"no {what} {low:.3g} to {high:.3g} {unit}", "no"
        return Claim(title, _signed(published), here, "simulated", must, checked, is_close)


def make(cfg: DictConfig, siblings: Mapping[str, Sibling]) -> Report:
    """Simulate all models on all networks, and fit the assumptions that give the published gains.

    Raises:
        ValueError: If the config has an unknown name.
    """
    by_network = groupby(cases_of(cfg), key=lambda case: case.network_name)
    cases = {network: list(own) for network, own in by_network}
    claims = [*_simulated_claims(cases, listed(cfg, "baselines")), *_measured_claims(siblings)]
    return Report(claims, list(_rows(cases)), _picture(cases))


def _rows(cases: Cases) -> Iterator[dict[str, Any]]:
    for network, own in cases.items():
        for case in own:
            for way, step_s in case.steps_s.items():
                yield {
                    "network": network,
                    "model": case.workload.name,
                    "strategy": way,
                    "alone_s": ranking.alone_s(case.workload),
                    "step_s": step_s,
                    "dear_gain": case.gain(way),
                }


# --- cases ----------------------------------------------------------------------------------------


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


def _builders(cfg: DictConfig) -> dict[str, strategies.Builder]:
    """Return name of a strategy or variant -> builder of its step."""
    names = *listed(cfg, "baselines"), *listed(cfg, "ours")
    made = {name: strategies.resolve_strategy(name).build for name in names}
    horovod, given = strategies.horovod_program, cfg.horovod
    made |= {f"horovod, {one:g} ms": partial(horovod, cycle_s=one / 1e3) for one in given.cycles_ms}
    made |= {f"horovod, {one:g} MB": partial(horovod, fusion_mb=one) for one in given.fusion_mb}
    made |= {_capped(cap_mb): strategies.as_published(float(cap_mb)) for cap_mb in cfg.caps_mb}
    return made | {UNFUSED: strategies.as_published(None)}


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


# --- claims ---------------------------------------------------------------------------------------


def _simulated_claims(cases: Cases, baselines: Sequence[str]) -> Iterator[Claim]:
    """Yield the claims whose networks and baselines the config has."""
    yield _over_the_best(cases, baselines)
    if "horovod" in baselines:
        yield from _over_horovod(cases)
    theirs, rings = cases.get("dear_ethernet"), cases.get("ethernet_10g, rings")
    unfused = [name for name in ("wfbp", "bytescheduler") if name in baselines]
    if "ddp" in baselines and (held_up := [case for case in theirs or () if case.buffers_s]):
        here = _most(cases["dear_ethernet"], WITH_BUFFERS)
        yield buffers_of(held_up).claim("over DDP, dear_ethernet", ETHERNET, here)
    if rings and unfused:
        start = start_of(rings, unfused)
        here = _signed(start.gain(start.known))
        yield start.claim("nothing fused, ethernet_10g, rings", ETHERNET, here)
    if theirs:
        yield _of_nics(theirs[0].rate)


def _over_horovod(cases: Cases) -> Iterator[Claim]:
    for network in ("ethernet_10g, rings", "dear_ethernet"):
        if own := cases.get(network):
            here, trees = _most(own, "horovod"), cases.get(network.removesuffix(", rings"))
            if trees and trees is not own:
                here += f", with trees {_most(trees, 'horovod')}"
            yield cycle_of(own).claim(f"over Horovod, {network}", ETHERNET, here)
    theirs = cases.get("dear_infiniband")
    for network in ("infiniband_100g, rings", "infiniband_100g"):
        if theirs and (own := cases.get(network)):
            rate, here = rate_of(own, theirs[0].rate), _most(own, "horovod")
            yield rate.claim(f"over Horovod, {network}", INFINIBAND, here)


def cycle_of(cases: Sequence[Case]) -> Assumption:
    """Return the gain over Horovod as a function of Horovod's cycle."""

    def gain(cycle_s: float) -> float:
        build = partial(strategies.horovod_program, cycle_s=cycle_s)
        return max(case.step_s(build) / case.dear_s for case in cases) - 1

    words = "cycle of", "ms", 1e3
    return Assumption(gain, (1e-4, 2e-2), strategies.HOROVOD_CYCLE_S, words, "default of 0.21.3")


def rate_of(cases: Sequence[Case], known: float) -> Assumption:
    """Return the gain over Horovod as a function of the links' rate, in bit/s."""
    network, build = cases[0].network, strategies.STRATEGIES["horovod"].build

    def gain(rate: float) -> float:
        other = replace(network, between=Link(network.between.alpha_s, 8 / rate))
        return max(case.step_s(build, other) / case.tuned_s(other) for case in cases) - 1

    nominal, words = cases[0].rate, ("links of", "Gb/s", 1e-9)
    return Assumption(gain, (nominal / 5, nominal), known, words, "their own table")


def buffers_of(cases: Sequence[Case]) -> Assumption:
    """Return the gain over DDP as a function of the seconds that its forward waits for buffers."""

    def gain(buffers_s: float) -> float:
        return max((case.steps_s["ddp"] + buffers_s) / case.dear_s for case in cases) - 1

    known_s = max(case.buffers_s for case in cases)
    return Assumption(gain, (1e-4, 1e1), known_s, ("buffers take", "ms", 1e3), "two broadcasts")


def start_of(cases: Sequence[Case], names: Sequence[str]) -> Assumption:
    """Return the gain without fusion as a function of the start time of the others' all-reduces."""
    network = cases[0].network
    pairs = [(case, strategies.STRATEGIES[name].build) for case in cases for name in names]

    def gain(start_s: float) -> float:
        slower = replace(network, all_reduce=Link(start_s, network.outer_link.beta_s))
        return max(one.step_s(build, slower) / one.steps_s[UNFUSED] for one, build in pairs) - 1

    known_s, words = network.all_reduce_s(0.0), ("all-reduces start in", "ms", 1e3)
    return Assumption(gain, (known_s, 20 * known_s), known_s, words, "two halves")


def _over_the_best(cases: Cases, baselines: Sequence[str]) -> Claim:
    gains = [case.gain(*baselines) for own in cases.values() for case in own]
    title, here = "over the best, all networks", f"{_signed(min(gains))} to {_signed(max(gains))}"
    must, checked = "more than the schedule", f"its bound is {_signed(BOUND)}"
    return Claim(title, _signed(ETHERNET), here, "simulated", must, checked, "no")


def _of_nics(rate: float) -> Claim:
    found, known = rate / 1e10, 2
    title, here = "costs of 10 Gb/s, their table", f"{rate / 1e9:.1f} Gb/s"
    must, checked = f"{found:.2f} NICs", f"{known} in their config"
    return Claim(title, "10 Gb/s", here, "simulated", must, checked, is_plausible(found, known))


def _measured_claims(siblings: Mapping[str, Sibling]) -> Iterator[Claim]:
    rows = [row for one in siblings.values() for row in one.rows() if row["entry"] == "dear"]
    if rows:
        gains = [1 / float(row["ratio"]) - 1 for row in rows]
        ranks = " and ".join(dict.fromkeys(row["world_size"] for row in rows))
        here = f"{_signed(min(gains))} to {_signed(max(gains))}"
        yield Claim(f"ours over DDP, {ranks} ranks", "none", here, "measured")


def _most(cases: Sequence[Case], other: str) -> str:
    return _signed(max(case.gain(other) for case in cases))


def _signed(share: float) -> str:
    return f"{100 * share:+.0f} %"


# --- picture --------------------------------------------------------------------------------------


def _picture(cases: Cases) -> Any:
    """Draw gains over strategies with fusion, on Ethernet networks, or on all if there is none."""
    shown = [name for name in cases if "ethernet" in name] or list(cases)
    gains = {
        (name, way, case.workload.name): 100 * case.gain(way)
        for name in shown
        for case in cases[name]
        for way in case.steps_s
        if way.startswith(("ddp", "horovod", "mgwfbp"))
    }
    title = "DeAR with its best cap over others, simulated; the line is at 83 %"
    return grouped_bars(gains, "%", title, 100 * ETHERNET)
