"""Strategies side by side for one model on one network, and how each scales."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

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
    """A strategy and its step."""

    strategy: Strategy
    step: SimulatedStep

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
    rows = [Ranked(one, conditions.step(one, workload, network)) for one in strategies]
    return sorted(rows, key=lambda row: row.step.step_s)


def alone_s(workload: Workload) -> float:
    """Seconds of a step of one rank that sends nothing."""
    times = workload.times
    return times.forward_s + times.backward_s + times.step_s


def recommended(rows: Sequence[Ranked], baseline: str = "ddp", enough: float = ENOUGH) -> Ranked:
    """What to use: the fastest of those that a command line can ask for, or the baseline.

    The baseline stays where the fastest is faster by no more than `enough`.

    Raises:
        ValueError: If none of `rows` can be run.
    """
    runnable = [row for row in rows if row.strategy.overrides is not None]
    if not runnable:
        raise ValueError("None of these strategies can be run; add ddp or dear.")
    best = min(runnable, key=lambda row: row.step.step_s)
    for row in runnable:
        if row.strategy.name == baseline and row.step.step_s <= (1 + enough) * best.step.step_s:
            return row
    return best


def scaling(
    strategies: Sequence[Strategy],
    workload: Workload,
    network: Network,
    world_sizes: Iterable[int],
    conditions: Conditions = PLAIN,
) -> dict[str, dict[int, float]]:
    """Name -> number of ranks -> seconds of a step, for those numbers that fill nodes."""
    steps_s: dict[str, dict[int, float]] = {one.name: {} for one in strategies}
    for world_size in world_sizes:
        if world_size > network.ranks_per_node and world_size % network.ranks_per_node:
            continue
        sized = replace(network, world_size=world_size)
        for one in strategies:
            steps_s[one.name][world_size] = conditions.step(one, workload, sized).step_s
    return steps_s
