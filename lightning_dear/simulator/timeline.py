"""A simulated step as spans, which are written and drawn as measured ones are."""

from __future__ import annotations

from lightning_dear.simulator.program import (
    ALL_GATHER,
    ALL_REDUCE,
    BACKWARD,
    CODEC,
    FORWARD,
    REDUCE_SCATTER,
    STEP,
)
from lightning_dear.simulator.simulate import SimulatedStep
from lightning_dear.telemetry.spans import Span

LANES = (FORWARD, BACKWARD, CODEC, REDUCE_SCATTER, ALL_REDUCE, STEP, ALL_GATHER, "wait")
"""In the order in which a step goes through them."""

NUM_STEPS = 2
"""So that the first one's gathers are seen beside the second one's forward."""


def spans_of(step: SimulatedStep) -> list[Span]:
    """The last steps of rank 0 and of the link, by start time."""
    first = max(busy.step for busy in step.busy) - NUM_STEPS + 1
    computing = [
        Span("wait" if busy.is_wait else busy.kind, busy.kind, busy.begin_s, busy.end_s)
        for busy in step.busy
        if busy.step >= first
    ]
    begin_s = min((span.start_s for span in computing), default=0.0)
    sending = [
        Span(one.message.kind, f"bucket {one.message.number}", one.begin_s, one.end_s)
        for one in step.spans
        if one.begin_s >= begin_s
    ]
    return sorted([*computing, *sending], key=lambda span: span.start_s)


def lanes_of(spans: list[Span]) -> list[str]:
    """Those in which there is something."""
    used = {span.lane for span in spans}
    return [lane for lane in LANES if lane in used]
