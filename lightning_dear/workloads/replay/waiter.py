"""Waiting for given times, with an account of what `time.sleep` gets wrong."""

from __future__ import annotations

import time
from collections.abc import Callable

MIN_SLEEP_S = 2e-4
"""Shorter waits are put off until there is this much to wait for: `time.sleep` returns some 0.05 to
0.1 ms late, so that many short ones would be mostly lateness."""

MAX_CREDIT_S = 2.5e-4
"""What of a sleep's lateness the next waits are shortened by. More than that is not the timer's but
a busy processor's: time that computing and communicating took, and that counts."""

MAX_OWN_S = 1e-4
"""What of the replay's own Python, before and after a wait, waits are shortened by: some 0.03 ms
each just after a sleep. Limited, again so that a busy processor counts."""


class Waiter:
    """Lets time pass; over many waits the sum is right, and no wait is off by half a millisecond.

    Args:
        clock: Seconds since whenever.
        sleep: Blocks for the seconds it is given, or a little longer.

    Attributes:
        slept_s: Seconds spent sleeping.
        late_s: Lateness that was not made up for: how much longer than asked all waits took,
            because the processor was busy.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._owed_s = 0.0
        self._end_s = 0.0
        self.slept_s = 0.0
        self.late_s = 0.0

    def now(self) -> float:
        """The time, in seconds, for `wait`."""
        return self._clock()

    def wait(self, seconds: float, since: float) -> None:
        """Block for `seconds`, give or take what earlier waits were short or late by.

        Args:
            seconds: How long the replayed layer takes.
            since: When it began: what the replay itself has done since counts as waiting.
        """
        self._end_s = self._clock()
        self._owed_s += seconds - min(self._end_s - since, MAX_OWN_S)
        if self._owed_s < MIN_SLEEP_S:
            return
        start_s = self._end_s
        self._sleep(self._owed_s)
        self._end_s = self._clock()
        slept_s = self._end_s - start_s
        late_s = slept_s - self._owed_s
        self._owed_s = -min(late_s, MAX_CREDIT_S)
        self.slept_s += slept_s
        self.late_s += max(0.0, late_s - MAX_CREDIT_S)

    def leave(self) -> None:
        """Count what the replay itself has done since the last wait as waiting too."""
        self._owed_s -= min(self._clock() - self._end_s, MAX_OWN_S)
