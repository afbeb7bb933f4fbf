"""Strategies side by side for one model on one network."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_dear.simulator.network import Network
from lightning_dear.simulator.simulate import SimulatedStep, simulate
from lightning_dear.simulator.strategies import HOOKS, Strategy
from lightning_dear.simulator.workload import Workload

BASELINE = "ddp"

ENOUGH = 0.03
"""Share of the fastest step by which a simpler strategy may be slower and still be recommended."""


SIMPLE = (BASELINE, *HOOKS, "dear")
"""Names of strategies that are simpler to use than others, the simplest first."""

Pair = tuple[Strategy, Workload]


@dataclass(frozen=True)
class Ranked:
    """A strategy with its predicted step.

    Attributes:
        strategy: The strategy.
        step: Its predicted step.
        compressor: Name of the compressor that it uses.
        overrides: Overrides of `dear-train` that select both. None means that `dear-train` cannot
            run this pair.
    """

    strategy: Strategy
    step: SimulatedStep
    compressor: str = "none"
    overrides: str | None = None

    @property
    def name(self) -> str:
        """Name of strategy and compressor. DDP with a hook has `dear-train`'s name, as ddp_bf16."""
        if self.compressor == "none":
            return self.strategy.name
        return self.strategy.hooks.get(self.compressor, f"{self.strategy.name} + {self.compressor}")

    def efficiency(self, alone_s: float) -> float:
        """Return the efficiency of weak scaling, 0 to 1: one rank's step time over this one."""
        return alone_s / self.step.step_s


def predicted(strategy: Strategy, workload: Workload, network: Network) -> Ranked:
    """Return the predicted step of `workload` under a strategy."""
    used = workload.compressor if strategy.encodes(workload) else "none"
    step = simulate(strategy.program(workload, network))
    return Ranked(strategy, step, used, strategy.overrides_for(workload))


def pairs(strategies: Sequence[Strategy], workloads: Sequence[Workload]) -> list[Pair]:
    """Return each strategy paired with each workload whose compressor it can use.

    Args:
        strategies: Strategies to pair.
        workloads: The same model with different compressors. The first one is also paired with
            strategies that cannot use its compressor; they then run without it.
    """
    return [
        (strategy, workload)
        for number, workload in enumerate(workloads)
        for strategy in strategies
        if strategy.allows(workload) and (number == 0 or strategy.encodes(workload))
    ]


def alone_s(workload: Workload) -> float:
    """Return the seconds of a step of one rank alone, which sends nothing."""
    times = workload.times
    return times.forward_s + times.backward_s + times.step_s + workload.fixed_step_s


def recommended(rows: Sequence[Ranked], enough: float = ENOUGH) -> Ranked:
    """Return the row to use: the one that `chosen` picks of the rows that `dear-train` can run.

    Raises:
        ValueError: If none of `rows` can be run.
    """
    runnable = {row.name: row for row in rows if row.overrides is not None}
    if not runnable:
        raise ValueError("None of these strategies can be run. Add ddp or dear to strategies.")
    return runnable[chosen({name: row.step.step_s for name, row in runnable.items()}, enough)]


def chosen(steps_s: Mapping[str, float], enough: float = ENOUGH) -> str:
    """Return the name of the fastest strategy, or of a simpler one that is nearly as fast.

    Simpler ones are, in this order: DDP, DDP with a hook of its own, plain `strategy="dear"`.

    Args:
        steps_s: Name -> seconds of a step; at least one.
        enough: Share of the shortest step by which a simpler strategy's step may be longer.
    """
    best = min(steps_s, key=steps_s.__getitem__)
    most_s = (1 + enough) * steps_s[best]
    return next((one for one in SIMPLE if steps_s.get(one, float("inf")) <= most_s), best)
