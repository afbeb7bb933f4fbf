"""The link between all ranks: one message at a time, of those that may begin."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from lightning_dear.simulator.program import Message

Key = tuple[int, str, int]
"""Number of the step, kind and number of the message."""


@dataclass(frozen=True)
class Carried:
    """A message on the link, from `begin_s` to `end_s`, of the step with number `step`."""

    step: int
    message: Message
    begin_s: float
    end_s: float


class LinkQueue:
    """Carries messages in the order of their priorities and of the times when they could begin.

    What is launched later cannot change what has begun, so that the timeline is made no further
    than somebody needs to know it.

    Attributes:
        spans: What has been carried, in order.
    """

    def __init__(self) -> None:
        self.spans: list[Carried] = []
        self._free_s = 0.0
        self._ends_s: dict[Key, float] = {}
        self._count = 0
        # By the time when they may begin; and those whose time has come, by priority.
        self._coming: list[tuple[float, int, int, Message]] = []
        self._waiting: list[tuple[int, float, int, int, Message]] = []
        self._followers: dict[Key, list[tuple[float, int, int, Message]]] = {}

    def launch(self, step: int, message: Message, ready_s: float) -> None:
        """Takes a message that all ranks have launched by `ready_s`."""
        self._count += 1
        count = self._count
        before = None if message.after is None else (step, *message.after)
        if before is not None and before not in self._ends_s:
            self._followers.setdefault(before, []).append((ready_s, count, step, message))
            return
        begin_s = ready_s if before is None else max(ready_s, self._ends_s[before])
        heapq.heappush(self._coming, (begin_s, count, step, message))

    def end_s(self, step: int, kind: str, number: int) -> float:
        """When a message ends, seconds; all that could begin before it must have been launched.

        Raises:
            KeyError: If it was never launched.
        """
        key = (step, kind, number)
        while key not in self._ends_s:
            if not self._carry_next(math.inf):
                raise KeyError(f"{kind} {number} of step {step} was never launched")
        return self._ends_s[key]

    def carry_until(self, until_s: float) -> None:
        """Makes the timeline as far as messages begin before `until_s`."""
        while self._carry_next(until_s):
            pass

    def _carry_next(self, until_s: float) -> bool:
        self._let_come(self._free_s)
        begin_s = self._free_s
        if not self._waiting:
            begin_s = self._coming[0][0] if self._coming else math.inf
        if begin_s >= until_s or begin_s == math.inf:
            return False
        self._let_come(begin_s)
        *_, step, message = self._waiting[0]
        heapq.heappop(self._waiting)
        self._carry(Carried(step, message, begin_s, begin_s + message.seconds))
        return True

    def _let_come(self, until_s: float) -> None:
        while self._coming and self._coming[0][0] <= until_s:
            ready_s, count, step, message = heapq.heappop(self._coming)
            entry = (message.priority, ready_s, count, step, message)
            heapq.heappush(self._waiting, entry)

    def _carry(self, span: Carried) -> None:
        self.spans.append(span)
        self._free_s = span.end_s
        key = (span.step, *span.message.key)
        self._ends_s[key] = span.end_s
        for ready_s, count, step, message in self._followers.pop(key, ()):
            heapq.heappush(self._coming, (max(ready_s, span.end_s), count, step, message))
