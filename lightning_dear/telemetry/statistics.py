"""Measures exposed communication and sent bytes of each step, and records spans for a timeline.

Exposed communication is the time in which computation waited for a collective. A lane is a kind of
span; see `_LANES` in `timeline.py`. `latest_rank` compares the exposed communication of all ranks.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import fmean, median
from typing import Any, NamedTuple

from torch.autograd import profiler

from lightning_dear import private_names
from lightning_dear.collectives.work import Collectives
from lightning_dear.telemetry.clock import Clock
from lightning_dear.telemetry.timeline import Timeline

_IS_PROFILING = private_names.IS_PROFILING.name

LATE_SHARE = 0.1
"""Share of a step. A rank is called late if the others wait for it during more of the step. With
less, another split of the work would hardly make steps shorter, and ranks that do the same work
differ by some percent anyway."""


class Latest(NamedTuple):
    """The rank that the others wait for.

    Attributes:
        rank: Its number. None means that no rank is late, see `LATE_SHARE`.
        late_s: Seconds in a step that the other ranks wait longer than the one that waits least, in
            the mean over these other ranks.
    """

    rank: int | None
    late_s: float

    def __str__(self) -> str:
        """Returns a sentence with the rank and the time, or one that no rank is late."""
        late = f"{self.late_s * 1e3:.1f} ms"
        named = f"Rank {self.rank} is late: the others wait {late} longer a step."
        return "No rank is late." if self.rank is None else named


def median_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Returns the median of one value or more, and by how much it may be wrong.

    The error is half of a range in which the median of many more such values would lie, in 19 of 20
    cases, whatever their distribution is. Of fewer than eight values it is half of their range.
    """
    ranked, num_values = sorted(values), len(values)
    num_below = max(0, int(num_values / 2 - math.sqrt(num_values)))
    return median(ranked), (ranked[-1 - num_below] - ranked[num_below]) / 2


def latest_rank(waited: Sequence[tuple[float, float, float]]) -> Latest:
    """Finds the rank that the others wait for. Local.

    All ranks meet in each step, so that a step lasts equally long on all of them. While a rank does
    not wait for messages it works: it computes, loads data, writes logs, or sleeps. So the rank
    that waits least, for all kinds of collectives together, is the one that the others wait for.
    This holds for every backend, number of hops and order of waits. A slow link makes no rank late,
    since both of its ends wait.

    Args:
        waited: For each of two or more ranks, in seconds: its exposed communication in a step, by
            how much that may be wrong, and the time from step to step. No rank is late if twice the
            largest error could explain it.
    """
    waits_s, errors_s, steps_s = zip(*waited, strict=True)
    least_s, *others_s = sorted(waits_s)
    late_s = fmean(others_s) - least_s
    is_late = late_s > max(LATE_SHARE * max(steps_s), 2 * max(errors_s))
    return Latest(waits_s.index(least_s) if is_late else None, late_s)


class Instruments:
    """Measures and records for one `Pipeline`; all of the pipeline's parts use the same object.

    Args:
        clock: Clock of the device on which the pipeline trains.
        collectives: Collectives whose sent bytes are counted and whose spans are recorded. With
            local steps those of the inner half; see `follow` for the others.

    Attributes:
        clock: Same as the argument.
        timeline: Timeline in which spans are recorded at present. None means no recording.
        marks: List to which each wait appends the marks of its beginning and its end; to be
            assigned to. None means that nothing is appended.
        exchange_steps: Same as in `Timeline`; to be assigned to.
    """

    def __init__(self, clock: Clock, collectives: Collectives) -> None:
        self.clock = clock
        self.timeline: Timeline | None = None
        self.marks: list[Any] | None = None
        self.exchange_steps = 0
        self._collectives = self._outer = collectives
        # Bytes that have been counted in a step, of each of these collectives.
        self._counted = {collectives: 0}
        self._step_began: Any = None
        self._is_asked = clock.is_free
        self._last = self._current = self._new_statistics()

    def _new_statistics(self) -> "StepStatistics | None":
        return StepStatistics(self.clock) if self._is_asked else None

    @property
    def statistics(self) -> "StepStatistics | None":
        """Returns the statistics of the last finished optimizer step.

        On a CUDA device, waits are timed only in steps that begin after the first read of this
        property. So the result is None until the second `finish_step` after the first read.
        """
        self._is_asked = True
        return self._last

    def record_in(self, timeline: Timeline | None) -> None:
        """Begins or ends a recording.

        Args:
            timeline: Timeline in which spans are recorded from now on, also those of encoding,
                decoding, and collectives that are launched from now on. It gets the clock of this
                object. None ends the recording.
        """
        self.timeline = timeline
        if timeline is not None:
            timeline.clock, timeline.exchange_steps = self.clock, self.exchange_steps
        for one in self._counted:
            one.observer = None if timeline is None else timeline.observe
            one.showing = None if timeline is None else timeline.span

    def follow(self, collectives: Collectives) -> None:
        """Counts bytes and records spans of the outer half's collectives, too; see `after_step`."""
        self._outer, self._counted[collectives] = collectives, collectives.ledger.total()

    @contextmanager
    def span(self, lane: str) -> Iterator[None]:
        """Records the `with` block as a span of `lane`, in the timeline and in torch's profiler.

        Each of them is left out if it does not record.
        """
        with _in_profiler(lane), self.timeline.span(lane, lane) if self.timeline else nullcontext():
            yield

    @contextmanager
    def waiting(self, lane: str, reason: str) -> Iterator[None]:
        """Counts the `with` block, which waits for a collective, as exposed communication.

        Also records it in the timeline and in torch's profiler, if these record. The block is not
        counted if it raises, or if waits of this step are not timed (see `statistics`).

        Args:
            lane: Half of the exchange that is waited for, "reduce_scatter" or "all_gather".
            reason: Reason for the wait, which names the span.
        """
        # On a CUDA device the two marks of a wait cost the host time, so that they are made only if
        # they are used.
        is_timed = any(one is not None for one in (self._current, self.timeline, self.marks))
        start = self.clock.mark() if is_timed else None
        # There is no `finally`: after a failure of the device, the mark below could raise another
        # error, which would hide the first error.
        with _in_profiler(f"wait for {lane}: {reason}"):
            yield
        if is_timed:
            end = self.clock.mark()
            if self._current is not None:
                self._current.waits[lane].append((start, end))
            if self.timeline is not None:
                self.timeline.record("wait", reason, start, end)
            if self.marks is not None:
                self.marks += start, end

    def begin_step(self) -> None:
        """Marks the beginning of the optimizer step on a bucket, if a timeline is recorded."""
        self._step_began = None if self.timeline is None else self.clock.mark()

    def record_step(self, number: int) -> None:
        """Records the step of bucket `number` as a span that began at the last `begin_step`.

        Does nothing without a timeline, or if there was none at `begin_step`.
        """
        if self.timeline is not None and self._step_began is not None:
            self.timeline.record("step", f"bucket {number}", self._step_began, self.clock.mark())

    def finish_step(self) -> None:
        """Ends the measurement of an optimizer step, and begins that of the next one.

        `statistics` returns the measurements of the ended step from now on.
        """
        sent_bytes = self._newly_sent(self._collectives)
        if self._current is not None:
            self._current.wire_bytes = sent_bytes
        self._last, self._current = self._current, self._new_statistics()

    @contextmanager
    def after_step(self) -> Iterator["StepStatistics"]:
        """Counts the `with` block, which exchanges after a step, in that step's `statistics`, too.

        Yields:
            Statistics of the block alone. They have bytes of the collectives of `follow`, all that
            were sent since the last such block, once this block has ended.
        """
        of_next, self._current = self._current, StepStatistics(self.clock)
        # There is no `finally`: after an exception no step follows.
        yield self._current
        own, self._current = self._current, of_next
        own.wire_bytes = self._newly_sent(self._outer)
        if self._last is not None:
            self._last.add(own)

    def _newly_sent(self, collectives: Collectives) -> int:
        """Returns the bytes that were sent since the last call with these collectives."""
        before = self._counted[collectives]
        self._counted[collectives] = collectives.ledger.total()
        return self._counted[collectives] - before


def _in_profiler(name: str) -> AbstractContextManager[object]:
    """Returns a context that shows its block as a range in torch's profiler.

    The context does nothing if the profiler does not record, since a range takes 15 us even then.
    """
    if not getattr(profiler, _IS_PROFILING):
        return nullcontext()
    return profiler.record_function(f"dear: {name}")


class StepStatistics:
    """Holds the exposed communication and the sent bytes of one optimizer step.

    Args:
        clock: Clock of the device. On a CUDA device, the properties in seconds block until the
            device has reached the step's last wait.

    Attributes:
        waits: "reduce_scatter" or "all_gather" -> pairs of marks between which the host (or the
            CUDA stream) waited for such a collective.
        wire_bytes: Payload bytes that this rank sent from the end of the previous step to the end
            of this one.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.waits: dict[str, list[tuple[Any, Any]]] = {"reduce_scatter": [], "all_gather": []}
        self.wire_bytes = 0

    def add(self, other: "StepStatistics") -> None:
        """Adds waits and bytes of `other`. Does not block."""
        self.wire_bytes += other.wire_bytes
        for lane, waits in other.waits.items():
            self.waits[lane] += waits

    def _exposed_s(self, lane: str) -> float:
        """Returns the sum of the waits in `lane`, in seconds."""
        seconds = self._clock.seconds
        return sum(seconds(end) - seconds(start) for start, end in self.waits[lane])

    @property
    def exposed_reduce_scatter_s(self) -> float:
        """Returns the seconds in which the step's computation waited for reduced gradients.

        On a CUDA device, blocks until the device has reached the step's last wait.
        """
        return self._exposed_s("reduce_scatter")

    @property
    def exposed_all_gather_s(self) -> float:
        """Returns the seconds in which the step's computation waited for all-gathers.

        Most of these were launched by the step before. On a CUDA device, blocks until the device
        has reached the step's last wait.
        """
        return self._exposed_s("all_gather")

    @property
    def exposed_s(self) -> float:
        """Returns the seconds in which the step's computation waited for both kinds of collectives.

        On a CUDA device, blocks until the device has reached the step's last wait.
        """
        return self.exposed_reduce_scatter_s + self.exposed_all_gather_s
