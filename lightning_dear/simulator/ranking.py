"""Strategies side by side for one model on one network."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_dear.simulator.network import Network
from lightning_dear.simulator.simulate import SimulatedStep, simulate
from lightning_dear.simulator.strategies import HOOKS, Strategy
from lightning_dear.simulator.workload import Workload

BASELINE = "ddp"

ENOUGH = 0.03
"""Share of the step by which DDP must be slower before another strategy is worth a change."""


SIMPLE = (BASELINE, *HOOKS, "dear")
"""What needs fewer words in a script than others, the simplest first."""

Pair = tuple[Strategy, Workload]


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
        """Of both; of DDP with a hook what `dear-train` calls it."""
        if self.compressor == "none":
            return self.strategy.name
        both = f"{self.strategy.name} + {self.compressor}"
        return self.strategy.hooks.get(self.compressor, both)

    def efficiency(self, alone_s: float) -> float:
        """Of weak scaling, 0..1: the step of one rank alone over this one."""
        return alone_s / self.step.step_s


def predicted(strategy: Strategy, workload: Workload, network: Network) -> Ranked:
    """The step of `workload` under a strategy."""
    used = workload.compressor if strategy.encodes(workload) else "none"
    step = simulate(strategy.program(workload, network))
    return Ranked(strategy, step, used, strategy.overrides_for(workload))


def by_step(rows: Iterable[Ranked]) -> list[Ranked]:
    """The one with the shortest step first; of equal ones, as they were."""
    return sorted(rows, key=lambda row: row.step.step_s)


def pairs(strategies: Sequence[Strategy], workloads: Sequence[Workload]) -> list[Pair]:
    """Each of `strategies` with each workload whose compressor it can use.

    Args:
        strategies: Which.
        workloads: The same one with different compressors. Of the first, strategies that cannot use
            its compressor go without it.
    """
    return [
        (strategy, workload)
        for number, workload in enumerate(workloads)
        for strategy in strategies
        if strategy.allows(workload) and (number == 0 or strategy.encodes(workload))
    ]


def alone_s(workload: Workload) -> float:
    """Seconds of a step of one rank that sends nothing."""
    times = workload.times
    return times.forward_s + times.backward_s + times.step_s + workload.fixed_step_s


def recommended(rows: Sequence[Ranked], enough: float = ENOUGH) -> Ranked:
    """What to use: the one that is `chosen` of those that a command line can ask for.

    Raises:
        ValueError: If none of `rows` can be run.
    """
    runnable = {row.name: row for row in rows if row.overrides is not None}
    if not runnable:
        raise ValueError("None of these strategies can be run; add ddp or dear.")
    return runnable[chosen({name: row.step.step_s for name, row in runnable.items()}, enough)]


def chosen(steps_s: Mapping[str, float], enough: float = ENOUGH) -> str:
    """The name of the shortest step, or of a simpler strategy that is nearly as fast.

    That is DDP, or else DDP with a hook of its own, or else ours as it is.

    Args:
        steps_s: Name -> seconds of its step; at least one.
        enough: By which share of the shortest step a simpler strategy's may be longer.
    """
    best = min(steps_s, key=steps_s.__getitem__)
    most_s = (1 + enough) * steps_s[best]
    return next((one for one in SIMPLE if steps_s.get(one, math.inf) <= most_s), best)
