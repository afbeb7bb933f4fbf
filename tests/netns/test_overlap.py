"""On a link of known rate: what overlaps, read off a trace, and that the step is shorter for it."""

from __future__ import annotations

from statistics import mean, median

import pytest

from lightning_dear.emulation import EmulatedCluster
from lightning_dear.timeline import Span
from tests.distributed.harness import run_ranks
from tests.netns.work import (
    Probe,
    communication_alone,
    compute_alone,
    default_callbacks,
    seconds_of,
    train,
)

NUM_LAYERS, BATCH_SIZE = 12, 256


def _measure(directory: str) -> tuple[list[Span], list[float], float, float]:
    compute = compute_alone(NUM_LAYERS, BATCH_SIZE)
    steps_s, spans, compute_s, communication_s = [], [], [], []
    for block in range(3):
        probe = Probe(traced_step=5 if block == 0 else None)
        strategy = train(NUM_LAYERS, BATCH_SIZE, 9, probe, **default_callbacks(directory))
        exchange = communication_alone(strategy)
        spans += probe.spans
        # The traced block is for looking, not for timing.
        steps_s += probe.steps_s() if block else []
        compute_s.append(seconds_of(compute, 3))
        communication_s.append(seconds_of(exchange, 3))
    return spans, steps_s, median(compute_s), median(communication_s)


def _of(spans: list[Span], lane: str) -> list[Span]:
    return [span for span in spans if span.lane == lane]


@pytest.mark.netns
def test_communication_overlaps_backward_and_the_next_forward(tmp_path: object) -> None:
    with EmulatedCluster(num_hosts=2, rate_mbit=1000, mtu=9000) as cluster:
        measured = run_ranks(_measure, 2, str(tmp_path), hosts=cluster.hosts, timeout_s=240)
    compute_s = mean(alone_s for _, _, alone_s, _ in measured)
    for spans, steps_s, _, communication_s in measured:
        forwards, backwards = _of(spans, "forward"), _of(spans, "backward")
        late_gathers = [
            span
            for span in _of(spans, "all_gather")
            if span.end_s > forwards[1].start_s and span.start_s < forwards[1].start_s
        ]
        early_reductions = [
            span
            for span in _of(spans, "reduce_scatter")
            if backwards[0].start_s < span.start_s < backwards[0].end_s
        ]
        print(
            f"step {median(steps_s) * 1e3:.0f} ms, compute alone {compute_s * 1e3:.0f} ms,"
            f" communication alone {communication_s * 1e3:.0f} ms, ratio to their sum"
            f" {median(steps_s) / (compute_s + communication_s):.3f};"
            f" {len(late_gathers)} gathers in the next forward,"
            f" {len(early_reductions)} reductions in backward"
        )
        assert len(late_gathers) >= 3
        assert len(early_reductions) >= 3
        assert median(steps_s) <= 0.85 * (compute_s + communication_s)
