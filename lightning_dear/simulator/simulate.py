"""Runs a program for several steps, and returns the step time of the steady state."""

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_dear.planning.step import Carried, Program, Run

_WARM_UP_STEPS, _NUM_STEPS = 3, 4
"""Number of first steps that do not count, because the very first one waits for no earlier step;
and number of steps that count."""


@dataclass(frozen=True)
class SimulatedStep:
    """Mean over the counted steps, or over the steps of the counted rounds.

    Attributes:
        program: Program that was run.
        step_s: Seconds from the end of one step to the end of the next.
        exposed_s: Kind of message -> seconds in a step for which a rank waited for such messages.
        spans: Timeline of the link, from the first step on.
    """

    program: Program
    step_s: float
    exposed_s: Mapping[str, float]
    spans: tuple[Carried, ...]


def simulate(program: Program) -> SimulatedStep:
    """Simulate `program` on ranks that all behave alike. Equal arguments give equal results."""
    run, begin_s, num_steps = Run(), 0.0, _NUM_STEPS * program.num_steps
    for step in range(_WARM_UP_STEPS + _NUM_STEPS):
        if step == _WARM_UP_STEPS:
            begin_s = run.clock_s
        run.do(step, program.ops)
    exposed_s = {message.kind: 0.0 for message in program.messages}
    for busy in run.busy:
        if busy.is_wait and busy.step >= _WARM_UP_STEPS:
            exposed_s[busy.kind] += (busy.end_s - busy.begin_s) / num_steps
    step_s = (run.clock_s - begin_s) / num_steps
    return SimulatedStep(program, step_s, exposed_s, tuple(run.link.spans))
