"""Strategies side by side for one model on one network."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_dear.simulator import Network, SimulatedStep, Workload, simulate
from lightning_dear.simulator.strategies import HOOKS, Strategy

BASELINE = "ddp"

ENOUGH = 0.03
"""Share of the fastest step by which a simpler strategy may be slower and still be recommended."""


SIMPLE = (BASELINE, *HOOKS, "dear")
"""Names of strategies that are simpler to use than others, the simplest first."""

Pair = tuple[Strategy, Workload]

_RATES, _BISECTIONS = (1e3, 1e15), 16
"""Bits per second between which a rate is sought, and how often the distance is halved. So the rate
is known to 0.05 %."""


@dataclass(frozen=True)
class Ranked:
    """A strategy with its predicted step.

    Attributes:
        strategy: The strategy.
        step: Its predicted step.
        compressor: Name of the compressor that it uses.
        overrides: Overrides of `dear-train` that select both. None means that `dear-train` cannot
            run this pair.
        needed_bits_per_s: Rate of links at which computing alone is a given share of the step; see
            `needed_rate`. None means that it was not sought.
    """

    strategy: Strategy
    step: SimulatedStep
    compressor: str = "none"
    overrides: str | None = None
    needed_bits_per_s: float | None = None

    @property
    def name(self) -> str:
        """Name of strategy and compressor. DDP with a hook has `dear-train`'s name, as ddp_bf16."""
        if self.compressor == "none":
            return self.strategy.name
        return self.strategy.hooks.get(self.compressor, f"{self.strategy.name} + {self.compressor}")

    def efficiency(self, workload: Workload) -> float:
        """Return the efficiency of weak scaling, 0 to 1: one rank's step time over this one."""
        return alone_s(workload, self.strategy.batches) / self.step.step_s


def predicted(
    strategy: Strategy, workload: Workload, network: Network, need: float | None = None
) -> Ranked:
    """Return the predicted step of `workload` under a strategy.

    Args:
        strategy: The strategy.
        workload: The model, with a compressor or without one.
        network: The network.
        need: Share of a step for which to seek the rate, as `needed_rate` does, if `dear-train` can
            run the pair and no search finds its plan. None means that it is not sought.
    """
    used = workload.compressor if strategy.encodes(workload) else "none"
    step, rate = simulate(strategy.program(workload, network)), None
    overrides = strategy.overrides_for(workload)
    if need and overrides is not None and not strategy.searches:
        rate = needed_rate(strategy, workload, network, need)
    return Ranked(strategy, step, used, overrides, rate)


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


def alone_s(workload: Workload, batches: int = 1) -> float:
    """Return the seconds of a step of one rank alone, which sends nothing.

    Args:
        workload: The model.
        batches: Number of micro-batches of an optimizer step. With more than 1, the result is the
            seconds of one of them.
    """
    times = workload.times
    return times.forward_s + times.backward_s + (times.step_s + workload.fixed_step_s) / batches


def needed_rate(strategy: Strategy, workload: Workload, network: Network, share: float) -> float:
    """Return the rate of links at which computing alone is a given share of a step.

    The rate is that of `Network.outer_link`; see `Network.at_rate`. Runs 17 simulations.

    Args:
        strategy: The strategy. Its plan must not depend on a search: such plans change from rate to
            rate, so that a step at a higher rate may be longer.
        workload: The model, with a compressor or without one.
        network: The network, whose own rate does not matter.
        share: Share of a step, above 0 and below 1.

    Returns:
        Bits per second. Infinity means that no rate is enough, because starts of messages or
        encoding alone cost more than the rest of the step.

    Raises:
        ValueError: If a search finds the strategy's plan.
    """
    if strategy.searches:
        raise ValueError(f"{strategy.name} searches its plan. Choose another strategy, as dear.")
    most_s = alone_s(workload, strategy.batches) / share

    def is_enough(bits_per_s: float) -> bool:
        return simulate(strategy.program(workload, network.at_rate(bits_per_s))).step_s <= most_s

    low, high = _RATES
    if not is_enough(math.inf):
        return math.inf
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


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
