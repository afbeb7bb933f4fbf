"""Runs a program step after step, and says what a step takes in the long run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_dear.planning.step import (
    ALL_GATHER,
    ALL_REDUCE,
    BACKWARD,
    CODEC,
    FORWARD,
    REDUCE_SCATTER,
    STEP,
    Busy,
    Carried,
    Program,
    Run,
)
from lightning_dear.telemetry.spans import Span

_WARM_UP_STEPS, _NUM_STEPS = 3, 4
"""Steps that are not counted, since the first one waits for no step before it, and that are."""

_LANES = (FORWARD, BACKWARD, CODEC, REDUCE_SCATTER, ALL_REDUCE, STEP, ALL_GATHER, "wait")
"""In the order in which a step goes through them."""

_NUM_SHOWN = 2
"""Steps, so that the first one's gathers are seen beside the second one's forward."""


@dataclass(frozen=True)
class SimulatedStep:
    """What a step takes, on the average of those that were counted.

    Attributes:
        program: What ran.
        step_s: From one step's end to the next one's.
        exposed_s: Kind of message -> for how long a rank stood still for it.
        sent_bytes: By a rank.
        link_busy_s: For which the link carried something.
        spans: The link's timeline, from the first step on.
        busy: A rank's.
    """

    program: Program
    step_s: float
    exposed_s: Mapping[str, float]
    sent_bytes: float
    link_busy_s: float
    spans: tuple[Carried, ...]
    busy: tuple[Busy, ...]


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
    return SimulatedStep(
        program=program,
        step_s=(run.clock_s - begin_s) / _NUM_STEPS,
        exposed_s=exposed_s,
        sent_bytes=program.sent_bytes,
        link_busy_s=sum(message.seconds for message in program.messages),
        spans=tuple(run.link.spans),
        busy=tuple(run.busy),
    )


def spans_of(step: SimulatedStep) -> list[Span]:
    """The last steps of a rank and of the link, by start time, as measured ones are drawn."""
    first = max(busy.step for busy in step.busy) - _NUM_SHOWN + 1
    computing = [
        Span("wait" if busy.is_wait else busy.kind, busy.kind, busy.begin_s, busy.end_s)
        for busy in step.busy
        if busy.step >= first
    ]
    begin_s = min((span.start_s for span in computing), default=0.0)
    sending = [
        Span(one.lane, f"bucket {one.bucket}", one.begin_s, one.end_s)
        for one in step.spans
        if one.begin_s >= begin_s
    ]
    return sorted([*computing, *sending], key=lambda span: span.start_s)


def lanes_of(spans: list[Span]) -> list[str]:
    """Those in which there is something."""
    used = {span.lane for span in spans}
    return [lane for lane in _LANES if lane in used]
