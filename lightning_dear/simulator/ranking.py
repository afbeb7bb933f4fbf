"""Strategies side by side for one model on one network, and how each scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightning_dear.simulator.network import Network
from lightning_dear.simulator.simulate import SimulatedStep, simulate
from lightning_dear.simulator.stragglers import NO_STRAGGLERS, Stragglers
from lightning_dear.simulator.strategies import Strategy
from lightning_dear.simulator.workload import Workload

ENOUGH = 0.03
"""Share of the step by which DDP must be slower before another strategy is worth a change."""


@dataclass(frozen=True)
class Conditions:
    """What else counts, beside the model and the network.

    Attributes:
        stragglers: Ranks that compute more slowly.
        contention: See `simulate`.
        num_steps: Steps that are counted.
    """

    stragglers: Stragglers = NO_STRAGGLERS
    contention: float = 0.0
    num_steps: int = 4

    def step(self, strategy: Strategy, workload: Workload, network: Network) -> SimulatedStep:
        """What a step takes under `strategy`."""
        return simulate(
            strategy.program(workload, network),
            network.world_size,
            num_steps=self.num_steps,
            stragglers=self.stragglers,
            contention=self.contention,
        )


PLAIN = Conditions()
"""Ranks that are alike, and computing that nothing slows down."""


@dataclass(frozen=True)
class Ranked:
    """A strategy and its step.

    Attributes:
        strategy: Which.
        step: What it takes.
        compressor: What it encodes with.
        overrides: What `dear-train` takes to use both; None where it cannot.
    """

    strategy: Strategy
    step: SimulatedStep
    compressor: str = "none"
    overrides: str | None = None

    @property
    def name(self) -> str:
        """Of both."""
        suffix = "" if self.compressor == "none" else f" + {self.compressor}"
        return f"{self.strategy.name}{suffix}"

    @property
    def memory_bytes(self) -> float:
        """Of parameters, gradients, optimizer state and buffers; activations come on top."""
        return sum(self.step.program.memory_bytes.values())

    def efficiency(self, alone_s: float) -> float:
        """Of weak scaling, 0..1: the step of one rank alone over this one."""
        return alone_s / self.step.step_s


def ranked(
    strategies: Iterable[Strategy],
    workload: Workload,
    network: Network,
    conditions: Conditions = PLAIN,
) -> list[Ranked]:
    """All of `strategies`, the one with the shortest step first; of equal ones, as they were."""
    rows = [_ranked(one, workload, network, conditions) for one in strategies]
    return sorted(rows, key=lambda row: row.step.step_s)


def _ranked(
    strategy: Strategy, workload: Workload, network: Network, conditions: Conditions
) -> Ranked:
    used = workload.compressor if strategy.encodes(workload) else "none"
    step = conditions.step(strategy, workload, network)
    return Ranked(strategy, step, used, strategy.overrides_for(workload))


def ranked_with(
    strategies: Sequence[Strategy],
    workloads: Sequence[Workload],
    network: Network,
    conditions: Conditions = PLAIN,
) -> list[Ranked]:
    """Each of `strategies` with each workload's compressor that it can use, the fastest first.

    Args:
        strategies: Which.
        workloads: The same one with different compressors. Of the first, strategies that cannot use
            its compressor are shown without it.
        network: Where to.
        conditions: What else counts.
    """
    rows = [_ranked(*pair, network, conditions) for pair in _pairs(strategies, workloads)]
    return sorted(rows, key=lambda row: row.step.step_s)


def num_ranked(strategies: Sequence[Strategy], workloads: Sequence[Workload]) -> int:
    """How many rows `ranked_with` has."""
    return len(_pairs(strategies, workloads))


def _pairs(
    strategies: Sequence[Strategy], workloads: Sequence[Workload]
) -> list[tuple[Strategy, Workload]]:
    return [
        (strategy, workload)
        for number, workload in enumerate(workloads)
        for strategy in strategies
        if strategy.allows(workload) and (number == 0 or strategy.encodes(workload))
    ]


@dataclass(frozen=True)
class Scaled:
    """A step of a strategy with some number of ranks."""

    name: str
    world_size: int
    step_s: float


def alone_s(workload: Workload) -> float:
    """Seconds of a step of one rank that sends nothing."""
    times = workload.times
    return times.forward_s + times.backward_s + times.step_s + workload.fixed_step_s


def recommended(rows: Sequence[Ranked], baseline: str = "ddp", enough: float = ENOUGH) -> Ranked:
    """What to use: the fastest of those that a command line can ask for, or the baseline.

    The baseline stays where the fastest is faster by no more than `enough`.

    Raises:
        ValueError: If none of `rows` can be run.
    """
    runnable = [row for row in rows if row.overrides is not None]
    if not runnable:
        raise ValueError("None of these strategies can be run; add ddp or dear.")
    by_name = {row.name: row for row in runnable}
    steps_s = {name: row.step.step_s for name, row in by_name.items()}
    return by_name[chosen(steps_s, baseline, enough)]


def chosen(steps_s: Mapping[str, float], baseline: str = "ddp", enough: float = ENOUGH) -> str:
    """The name of the shortest step, or the baseline if that is longer by no more than `enough`.

    Args:
        steps_s: Name -> seconds of its step; at least one.
        baseline: What stays where little is to be gained; may be missing.
        enough: Share of the shortest step.
    """
    best = min(steps_s, key=steps_s.__getitem__)
    is_enough = steps_s.get(baseline, math.inf) <= (1 + enough) * steps_s[best]
    return baseline if is_enough else best


def scaling(
    strategies: Sequence[Strategy],
    workloads_of: Callable[[int], Sequence[Workload]],
    network_of: Callable[[int], Network],
    world_sizes: Iterable[int],
    conditions: Conditions = PLAIN,
) -> Iterator[Scaled]:
    """Each strategy's step at each number of ranks, one after the other as they are simulated.

    Args:
        strategies: Which.
        workloads_of: Number of ranks -> what is trained, without a compressor and with others.
        network_of: Number of ranks -> the network among so many.
        world_sizes: Numbers of ranks.
        conditions: What else counts.
    """
    for world_size in world_sizes:
        sized, workloads = network_of(world_size), workloads_of(world_size)
        for one in strategies:
            for row in ranked_with([one], workloads, sized, conditions):
                yield Scaled(row.name, world_size, row.step.step_s)


def filling(world_sizes: Iterable[int], inside: int) -> list[int]:
    """Those numbers of ranks that fit into one node of `inside` ranks, or fill several."""
    return [size for size in world_sizes if size <= inside or size % inside == 0]
