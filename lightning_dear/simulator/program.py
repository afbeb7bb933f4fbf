"""What a rank does in a step: computes, hands over messages, and waits for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

FORWARD, BACKWARD, STEP, CODEC = "forward", "backward", "step", "codec"
"""Kinds of computing."""

REDUCE_SCATTER, ALL_GATHER, ALL_REDUCE = "reduce_scatter", "all_gather", "all_reduce"
"""Kinds of messages; others name their own."""


@dataclass(frozen=True)
class Compute:
    """Something that keeps the rank busy for `seconds`."""

    kind: str
    seconds: float


@dataclass(frozen=True)
class Message:
    """A collective of all ranks, which the link carries once all have launched it.

    Attributes:
        kind: What it is, for people and for what is counted as exposed.
        number: Which of its kind; a bucket's, say.
        seconds: For which it keeps the link busy.
        nbytes: What a rank sends for it.
        priority: Of those that could begin, the lowest goes first, then the one that could first.
        after: Begins no earlier than this one, of the same step, ends.
    """

    kind: str
    number: int
    seconds: float
    nbytes: float = 0.0
    priority: int = 0
    after: tuple[str, int] | None = None

    @property
    def key(self) -> tuple[str, int]:
        """By which it is waited for."""
        return self.kind, self.number


@dataclass(frozen=True)
class Launch:
    """Hands a message over; takes no time."""

    message: Message


@dataclass(frozen=True)
class Wait:
    """Stands still until a message has ended.

    Attributes:
        key: Of the message.
        from_last_step: Whether the step before launched it; there is none to wait for in the first.
    """

    key: tuple[str, int]
    from_last_step: bool = False


Op = Compute | Launch | Wait


@dataclass(frozen=True)
class Program:
    """A step of each rank: forward, backward, optimizer step, in whatever order they are mixed.

    Attributes:
        name: For people.
        ops: In the order in which every rank gets to them.
        memory_bytes: Kind of memory -> bytes of it that a rank holds throughout.
    """

    name: str
    ops: tuple[Op, ...]
    memory_bytes: Mapping[str, float] = field(default_factory=dict)

    @property
    def messages(self) -> list[Message]:
        """What it sends, in the order of its launches."""
        return [op.message for op in self.ops if isinstance(op, Launch)]

    @property
    def sent_bytes(self) -> float:
        """What a rank sends in a step."""
        return sum(message.nbytes for message in self.messages)

    @property
    def compute_s(self) -> float:
        """Seconds without any waiting."""
        return sum(op.seconds for op in self.ops if isinstance(op, Compute))


def interleaved(
    kind: str, length_s: float, events: Iterable[tuple[float, Sequence[Op]]]
) -> list[Op]:
    """Computing of `length_s` in all, with operations in between at their times.

    Args:
        kind: Of the computing.
        length_s: Seconds of it.
        events: Seconds of computing before the operations, and the operations; in any order. Later
            than the end counts as at the end.
    """
    ops: list[Op] = []
    reached_s = 0.0
    for at_s, others in sorted(events, key=lambda event: event[0]):
        if min(at_s, length_s) > reached_s:
            ops.append(Compute(kind, min(at_s, length_s) - reached_s))
            reached_s = min(at_s, length_s)
        ops.extend(others)
    if length_s > reached_s:
        ops.append(Compute(kind, length_s - reached_s))
    return [op for op in ops if not isinstance(op, Compute) or op.seconds]
