"""The stream clock, over events that count as a device does: fp32 milliseconds."""

from __future__ import annotations

from typing import Any

import torch

from lightning_dear.collectives.gloo import PairwiseCollectives
from lightning_dear.telemetry.clock import HostClock, StreamClock
from lightning_dear.telemetry.statistics import Instruments
from lightning_dear.telemetry.timeline import Timeline

DAY_MS = 86_400_000.0


class _Event:
    """Knows its moment; says how far another is away in fp32."""

    def __init__(self, cuda: _Cuda) -> None:
        self._cuda = cuda
        cuda.num_events += 1

    def record(self, stream: Any) -> None:
        self.at_ms = self._cuda.now_ms

    def synchronize(self) -> None:
        return

    def elapsed_time(self, end: _Event) -> float:
        return float(torch.tensor(end.at_ms - self.at_ms, dtype=torch.float32))


class _Cuda:
    """What stands in for torch.cuda; time passes when it is told to."""

    def __init__(self) -> None:
        self.now_ms, self.num_events = 0.0, 0

    def Event(self, enable_timing: bool = False) -> _Event:  # noqa: N802
        return _Event(self)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def test_a_wait_of_a_tenth_of_a_millisecond_is_seen_after_a_day() -> None:
    cuda = _Cuda()
    clock = StreamClock(torch.device("cuda"), cuda)
    begin_s = clock.seconds(clock.mark())
    cuda.now_ms = DAY_MS
    start = clock.mark()
    cuda.now_ms += 0.1
    end = clock.mark()
    assert abs(clock.seconds(end) - clock.seconds(start) - 1e-4) < 1e-7
    assert abs(clock.seconds(start) - begin_s - DAY_MS / 1e3) < 0.01


def _wait(instruments: Instruments) -> None:
    with instruments.waiting("reduce_scatter", "gradients"):
        instruments.clock._cuda.now_ms += 2.0
    instruments.finish_step()


def test_a_device_marks_waits_only_while_somebody_wants_to_know() -> None:
    cuda = _Cuda()
    instruments = Instruments(
        StreamClock(torch.device("cuda"), cuda), PairwiseCollectives(None, None, None)
    )
    before = cuda.num_events
    _wait(instruments)
    assert cuda.num_events == before
    # The step under way may have waited already: from the next one on.
    assert instruments.statistics is None
    _wait(instruments)
    assert instruments.statistics is None
    _wait(instruments)
    assert instruments.statistics is not None
    assert abs(instruments.statistics.exposed_s - 2e-3) < 1e-9


def test_a_timeline_shows_waits_that_nobody_counts() -> None:
    cuda = _Cuda()
    clock, timeline = StreamClock(torch.device("cuda"), cuda), Timeline()
    instruments = Instruments(clock, PairwiseCollectives(None, None, None))
    instruments.record_in(timeline)
    _wait(instruments)
    assert [span.lane for span in timeline.spans] == ["wait"]


def test_a_host_counts_waits_from_the_beginning() -> None:
    instruments = Instruments(HostClock(), PairwiseCollectives(None, None, None))
    with instruments.waiting("all_gather", "read"):
        pass
    instruments.finish_step()
    assert instruments.statistics is not None
    assert instruments.statistics.exposed_all_gather_s > 0


def test_a_list_of_marks_gets_those_of_waits() -> None:
    cuda = _Cuda()
    clock = StreamClock(torch.device("cuda"), cuda)
    instruments = Instruments(clock, PairwiseCollectives(None, None, None))
    before = cuda.num_events
    _wait(instruments)
    assert cuda.num_events == before
    instruments.marks = [clock.mark()]
    for seconds in (1.0, 2.0):
        cuda.now_ms += seconds * 1e3
        _wait(instruments)
    start, *waits, end = [clock.seconds(mark) for mark in (*instruments.marks, clock.mark())]
    begun, ended = waits[::2], waits[1::2]
    assert len(waits) == 4
    assert abs(begun[0] - start - 1) < 1e-9
    assert abs(begun[1] - ended[0] - 2) < 1e-9
    assert abs(end - ended[1]) < 1e-9
