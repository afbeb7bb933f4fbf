"""Runs a program step after step, and says what a step takes in the long run."""

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_dear.planning.step import Carried, Program, Run

_WARM_UP_STEPS, _NUM_STEPS = 3, 4
"""Steps that are not counted, since the first one waits for no step before it, and that are."""


@dataclass(frozen=True)
class SimulatedStep:
    """What a step takes, on the average of those that were counted.

    Attributes:
        program: What ran.
        step_s: From one step's end to the next one's.
        exposed_s: Kind of message -> for how long a rank stood still for it.
        spans: The link's timeline, from the first step on.
    """

    program: Program
    step_s: float
    exposed_s: Mapping[str, float]
    spans: tuple[Carried, ...]


def simulate(program: Program) -> SimulatedStep:
    """Run `program` on ranks that are alike. Pure: equal arguments give equal results."""
    run, begin_s = Run(), 0.0
    for step in range(_WARM_UP_STEPS + _NUM_STEPS):
        if step == _WARM_UP_STEPS:
            begin_s = run.clock_s
        run.do(step, program.ops)
    exposed_s = {message.kind: 0.0 for message in program.messages}
    for busy in run.busy:
        if busy.is_wait and busy.step >= _WARM_UP_STEPS:
            exposed_s[busy.kind] += (busy.end_s - busy.begin_s) / _NUM_STEPS
    step_s = (run.clock_s - begin_s) / _NUM_STEPS
    return SimulatedStep(program, step_s, exposed_s, tuple(run.link.spans))
