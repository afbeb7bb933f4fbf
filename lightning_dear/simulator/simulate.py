"""Runs a program on all ranks, step after step, and says what a step takes in the long run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from lightning_dear.simulator.link_queue import Carried, LinkQueue
from lightning_dear.simulator.program import BACKWARD, FORWARD, Compute, Launch, Program, Wait
from lightning_dear.simulator.stragglers import NO_STRAGGLERS, Floats, Stragglers

_STRAGGLING = frozenset((FORWARD, BACKWARD))


@dataclass(frozen=True)
class Busy:
    """Something that a rank did, or stood still for (`is_wait`), from `begin_s` to `end_s`."""

    step: int
    kind: str
    begin_s: float
    end_s: float
    is_wait: bool = False


@dataclass(frozen=True)
class SimulatedStep:
    """What a step takes, on the average of those that were counted.

    Attributes:
        program: What ran.
        step_s: From one step's end to the next one's, on the average of all ranks.
        steps_s: Of each step that was counted.
        exposed_s: Kind of message -> for how long a rank stood still for it.
        sent_bytes: By a rank.
        link_busy_s: For which the link carried something.
        spans: The link's timeline, from the first step on.
        busy: That of rank 0.
    """

    program: Program
    step_s: float
    steps_s: tuple[float, ...]
    exposed_s: Mapping[str, float]
    sent_bytes: float
    link_busy_s: float
    spans: tuple[Carried, ...]
    busy: tuple[Busy, ...]


def simulate(
    program: Program,
    world_size: int,
    *,
    num_steps: int = 4,
    warm_up_steps: int = 3,
    stragglers: Stragglers = NO_STRAGGLERS,
    contention: float = 0.0,
) -> SimulatedStep:
    """Run `program` on all ranks. Pure: equal arguments give equal results.

    A message begins when the last rank has launched it and ends on all ranks at once.

    Args:
        program: A step.
        world_size: Number of ranks.
        num_steps: Steps that are counted.
        warm_up_steps: Steps before these, since the first one waits for no step before it.
        stragglers: Ranks that compute more slowly.
        contention: While the link is busy, computing takes 1 + contention times as long, as copies
            and sums take memory's bandwidth, or a core.
    """
    run = _Run(stragglers.factors(world_size, warm_up_steps + num_steps), contention)
    ends_s = [0.0]
    for step in range(warm_up_steps + num_steps):
        if step == warm_up_steps:
            run.waited_s.clear()
        for op in program.ops:
            run.do(step, op)
        ends_s.append(float(run.clock_s.mean()))
    steps_s = np.diff(ends_s)[warm_up_steps:]
    return SimulatedStep(
        program=program,
        step_s=float(steps_s.mean()),
        steps_s=tuple(map(float, steps_s)),
        exposed_s={kind: total / num_steps for kind, total in run.waited_s.items()},
        sent_bytes=program.sent_bytes,
        link_busy_s=sum(message.seconds for message in program.messages),
        spans=tuple(run.link.spans),
        busy=tuple(run.busy),
    )


class _Run:
    """All ranks' clocks, and the link between them."""

    def __init__(self, factors: Floats, contention: float) -> None:
        self.clock_s = np.zeros(factors.shape[1])
        self.link = LinkQueue()
        self.waited_s: dict[str, float] = {}
        self.busy: list[Busy] = []
        self._factors, self._contention = factors, contention

    def do(self, step: int, op: Compute | Launch | Wait) -> None:
        match op:
            case Compute():
                self._compute(step, op)
            case Launch(message):
                self.link.launch(step, message, float(self.clock_s.max()))
            case Wait(key, from_last_step):
                self._wait(step - from_last_step, step, *key)

    def _compute(self, step: int, op: Compute) -> None:
        begin_s = float(self.clock_s[0])
        seconds = op.seconds * self._factors[step] if op.kind in _STRAGGLING else op.seconds
        if self._contention:
            self.clock_s = self._contended(seconds)
        else:
            self.clock_s = self.clock_s + seconds
        self.busy.append(Busy(step, op.kind, begin_s, float(self.clock_s[0])))

    def _contended(self, seconds: Floats | float) -> Floats:
        """When all have done what takes so long alone: work is a rising function of time."""
        latest_s = float((self.clock_s + (1 + self._contention) * seconds).max())
        self.link.carry_until(latest_s)
        times_s, work_s = self._work(float(self.clock_s.min()), latest_s)
        goal_s = np.interp(self.clock_s, times_s, work_s) + seconds
        return np.interp(goal_s, work_s, times_s)

    def _work(self, from_s: float, until_s: float) -> tuple[Floats, Floats]:
        """Times, and what is computed until each: less while the link is busy."""
        times_s, work_s = [from_s], [0.0]
        recent = list(takewhile(lambda span: span.end_s > from_s, reversed(self.link.spans)))
        for span in reversed(recent):
            begin_s = max(span.begin_s, from_s)
            work_s.append(work_s[-1] + begin_s - times_s[-1])
            work_s.append(work_s[-1] + (span.end_s - begin_s) / (1 + self._contention))
            times_s += [begin_s, span.end_s]
        rest_s = max(until_s - times_s[-1], 0.0) + 1.0
        return np.array([*times_s, times_s[-1] + rest_s]), np.array([*work_s, work_s[-1] + rest_s])

    def _wait(self, launched_in: int, step: int, kind: str, number: int) -> None:
        if launched_in < 0:
            return
        end_s = self.link.end_s(launched_in, kind, number)
        waits_s = np.maximum(end_s - self.clock_s, 0.0)
        if waits_s[0] > 0:
            self.busy.append(Busy(step, kind, float(self.clock_s[0]), end_s, is_wait=True))
        self.waited_s[kind] = self.waited_s.get(kind, 0.0) + float(waits_s.mean())
        self.clock_s = np.maximum(self.clock_s, end_s)
