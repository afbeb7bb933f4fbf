"""A step as every rank runs it: computing, messages that are handed over, and waits.

Planners and the simulator make such steps of plans, and both run them here: so a prediction is the
simulated step. Ranks are alike, so that one clock stands for all; they share one link, which
carries one message at a time.
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lightning_dear.planning.measured import BucketCost, ModelTimes
from lightning_dear.planning.plan import BucketPlan

FORWARD, BACKWARD, STEP, CODEC = "forward", "backward", "step", "codec"
"""Kinds of computing."""

REDUCE_SCATTER, ALL_GATHER, ALL_REDUCE = "reduce_scatter", "all_gather", "all_reduce"
"""Kinds of messages."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Keeps the rank busy for `seconds`.

    Attributes:
        kind: What it is.
        seconds: How long it takes.
        at_s: In a `Phase`: how much of its computing is done then. None: what interrupts it.
    """

    kind: str
    seconds: float
    at_s: float | None = None


@dataclass(frozen=True, slots=True)
class Phase:
    """Marks where forward or backward `begins`, or ends.

    In between the clock is the phase's beginning, what of it is done, and its delays. Adding up all
    the pieces instead would round, and plans that are equally good would no longer be equal.
    """

    begins: bool


@dataclass(frozen=True, slots=True)
class Message:
    """Describes a collective of all ranks, which the link carries once all launched it.

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
        """Returns by what it is waited for."""
        return self.kind, self.number


@dataclass(frozen=True, slots=True)
class Launch:
    """Hands a message over; takes no time."""

    message: Message


@dataclass(frozen=True, slots=True)
class Wait:
    """Stands still until a message has ended.

    Attributes:
        key: Of the message.
        from_last_step: Whether the step before launched it; there is none to wait for in the first.
    """

    key: tuple[str, int]
    from_last_step: bool = False


Op = Compute | Phase | Launch | Wait


@dataclass(frozen=True)
class Program:
    """Describes a step of each rank: forward, backward, optimizer step, however mixed.

    Attributes:
        name: For people.
        ops: In the order in which every rank gets to them.
    """

    name: str
    ops: tuple[Op, ...]

    @property
    def messages(self) -> list[Message]:
        """Returns what it sends, in the order of its launches."""
        return [op.message for op in self.ops if isinstance(op, Launch)]

    @property
    def sent_bytes(self) -> float:
        """Returns what a rank sends in a step."""
        return sum(message.nbytes for message in self.messages)


def interleaved(
    kind: str, length_s: float, events: Iterable[tuple[float, Sequence[Op]]]
) -> list[Op]:
    """Returns computing of `length_s` in all, with operations in between at their times.

    Args:
        kind: Of the computing.
        length_s: Seconds of it.
        events: Seconds of computing before the operations, and the operations; in any order. Later
            than the end counts as at the end.
    """
    ops: list[Op] = [Phase(begins=True)]
    reached_s = 0.0
    for at_s, others in (*sorted(events, key=lambda event: event[0]), (length_s, ())):
        at_s = min(at_s, length_s)
        if at_s > reached_s:
            ops.append(Compute(kind, at_s - reached_s, at_s))
            reached_s = at_s
        ops.extend(others)
    return [*ops, Phase(begins=False)]


# --- running it -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Carried:
    """Describes a message on the link: its kind and number, and from when to when.

    Attributes:
        step: Number of the step that launched it.
        lane: Its kind.
        bucket: Its number.
        begin_s: Seconds since the first step began.
        end_s: The same.
    """

    step: int
    lane: str
    bucket: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Busy:
    """Says what a rank did, or stood still for (`is_wait`), from `begin_s` to `end_s`."""

    step: int
    kind: str
    begin_s: float
    end_s: float
    is_wait: bool = False


_Key = tuple[int, tuple[str, int]]
"""Number of the step, and the message's key."""


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
        self._count = 0
        self._ends_s: dict[_Key, float] = {}
        # By the time when they may begin; and those whose time has come, by priority.
        self._coming: list[tuple[float, int, int, Message]] = []
        self._waiting: list[tuple[int, float, int, int, Message]] = []
        self._followers: dict[_Key, list[tuple[float, int, int, Message]]] = {}

    def launch(self, step: int, message: Message, ready_s: float) -> None:
        """Takes a message that the ranks have launched at `ready_s`."""
        self._count += 1
        if message.after is not None:
            before = (step, message.after)
            if before not in self._ends_s:
                entry = (ready_s, self._count, step, message)
                self._followers.setdefault(before, []).append(entry)
                return
            ready_s = max(ready_s, self._ends_s[before])
        heapq.heappush(self._coming, (ready_s, self._count, step, message))

    def end_s(self, step: int, key: tuple[str, int]) -> float:
        """Returns when a message ends, seconds; all that could begin before must be launched.

        Raises:
            KeyError: If it was never launched.
        """
        while (step, key) not in self._ends_s:
            if not self._waiting and not self._coming:
                raise KeyError(f"{key[0]} {key[1]} of step {step} was never launched")
            self._carry_next()
        return self._ends_s[step, key]

    def _carry_next(self) -> None:
        begin_s = self._free_s
        if not self._waiting:
            begin_s = max(begin_s, self._coming[0][0])
        while self._coming and self._coming[0][0] <= begin_s:
            ready_s, count, step, message = heapq.heappop(self._coming)
            heapq.heappush(self._waiting, (message.priority, ready_s, count, step, message))
        *_, step, message = heapq.heappop(self._waiting)
        end_s = self._free_s = begin_s + message.seconds
        self.spans.append(Carried(step, *message.key, begin_s, end_s))
        key = (step, message.key)
        self._ends_s[key] = end_s
        for ready_s, count, step, follower in self._followers.pop(key, ()):
            heapq.heappush(self._coming, (max(ready_s, end_s), count, step, follower))


class Run:
    """Steps as they are run, one after the other.

    Attributes:
        clock_s: Seconds since the first began.
        link: Carries what they launch.
        busy: What a rank has done, and waited for.
    """

    def __init__(self) -> None:
        self.clock_s = 0.0
        self.link = LinkQueue()
        self.busy: list[Busy] = []
        # Of the phase: its beginning, when it would be here without delays, and those.
        self._begin_s: float | None = None
        self._due_s = self._delay_s = 0.0

    def do(self, step: int, ops: Iterable[Op]) -> None:
        """Runs operations of the step with number `step`."""
        for op in ops:
            if isinstance(op, Compute):
                self._compute(step, op)
            elif isinstance(op, Launch):
                self.link.launch(step, op.message, self.clock_s)
            elif isinstance(op, Phase):
                self._begin_s = self.clock_s if op.begins else None
                self._due_s, self._delay_s = self.clock_s, 0.0
            elif step >= op.from_last_step:
                self._wait(step, op)

    def _compute(self, step: int, op: Compute) -> None:
        if self._begin_s is None:
            return self._pass_until(self.clock_s + op.seconds, step, op.kind)
        if op.at_s is None:
            self._delay_s += op.seconds
        else:
            self._due_s = self._begin_s + op.at_s
        return self._pass_until(self._due_s + self._delay_s, step, op.kind)

    def _wait(self, step: int, op: Wait) -> None:
        end_s = self.link.end_s(step - op.from_last_step, op.key)
        self._delay_s = max(self._delay_s, end_s - self._due_s)
        if end_s > self.clock_s:
            self._pass_until(end_s, step, op.key[0], is_wait=True)

    def _pass_until(self, end_s: float, step: int, kind: str, *, is_wait: bool = False) -> None:
        self.busy.append(Busy(step, kind, self.clock_s, end_s, is_wait))
        self.clock_s = end_s


# --- making it of a plan --------------------------------------------------------------------------


@dataclass(eq=False)
class PlannedStep(ABC):
    """Does with a plan what a rank of ours does; subclasses know what exchanges cost.

    Attributes:
        plan: Its buckets.
        times: When each is due.
        costs: What encoding costs, bucket by bucket.
        step_s: Seconds in which a rank steps its shards of all buckets, once gradients are there.
        late_step_s: Seconds in which it steps all of them whole, each where forward first reads it.
        stepped_bytes: What is stepped of each bucket: all but padding.
    """

    plan: BucketPlan
    times: ModelTimes
    costs: Sequence[BucketCost]
    step_s: float
    late_step_s: float

    def __post_init__(self) -> None:
        self.stepped_bytes = [bucket.stepped_bytes for bucket in self.plan.buckets]
        nbytes = max(sum(self.stepped_bytes), 1)
        self._per_byte_s, self._late_per_byte_s = self.step_s / nbytes, self.late_step_s / nbytes

    @abstractmethod
    def reduce(self, number: int) -> Message:
        """Returns a bucket's reduce-scatter, or its all-reduce."""

    @abstractmethod
    def gather(self, number: int) -> Message:
        """Returns a bucket's all-gather."""

    def forward(self) -> list[Op]:
        """Stands still at a bucket's first read until it is there; decodes, and steps, it there."""
        gathered = [n for n in range(len(self.plan.buckets)) if n not in self.plan.all_reduced]
        uses = sorted((self.times.first_use_of(self.plan.buckets[n]), n) for n in gathered)
        events = [(at_s, self.before_use(number)) for at_s, number in uses]
        return interleaved(FORWARD, self.times.forward_s, events)

    def before_use(self, number: int) -> list[Op]:
        """Returns what comes before the first read of a bucket."""
        return [
            Wait((ALL_GATHER, number), from_last_step=True),
            *computed(CODEC, self.costs[number].decode_s),
            *computed(STEP, self._late_per_byte_s * self.stepped_bytes[number]),
        ]

    def backward(self) -> list[Op]:
        """Encodes and launches each bucket when its last gradient is there, in reduce order.

        Early gathers are launched with what they come after.
        """
        ready_s, events = 0.0, []
        followers = self._early_after()
        for number in self.plan.reduce_order:
            ready_s = max(ready_s, self.times.ready_of(self.plan.buckets[number]))
            ops: list[Op] = [*computed(CODEC, self.costs[number].encode_s)]
            ops.append(Launch(self.reduce(number)))
            for early in followers.get(number, ()):
                ops.append(Launch(replace(self.gather(early), after=(REDUCE_SCATTER, number))))
            events.append((self.launched_s(ready_s), ops))
        return interleaved(BACKWARD, self.times.backward_s, events)

    def launched_s(self, ready_s: float) -> float:
        """Returns when a bucket is launched that is complete at `ready_s`."""
        return ready_s

    def _early_after(self) -> dict[int, list[int]]:
        """Bucket whose reduce-scatter ends last -> early gathers that then may begin, in order."""
        order = {number: place for place, number in enumerate(self.plan.reduce_order)}
        followers: dict[int, list[int]] = {}
        last = None
        for number in self.plan.early:
            last = number if last is None else max(last, number, key=order.__getitem__)
            followers.setdefault(last, []).append(number)
        return followers

    def reduced(self) -> list[Op]:
        """Decodes and sums what has arrived, one bucket after the other."""
        ops: list[Op] = []
        for number in self.plan.reduce_order:
            is_whole = number in self.plan.all_reduced
            ops.append(Wait((ALL_REDUCE if is_whole else REDUCE_SCATTER, number)))
            ops += computed(CODEC, self.costs[number].sum_s)
        return ops

    def stepped(self) -> list[Op]:
        """Steps each bucket's shard and launches its gather.

        Buckets that are all-reduced come last, as no other rank waits for them; every rank steps
        the whole of them.
        """
        ops: list[Op] = []
        for number in range(len(self.plan.buckets)):
            if number in self.plan.all_reduced:
                continue
            ops += computed(STEP, self._per_byte_s * self.stepped_bytes[number])
            ops += computed(CODEC, self.costs[number].publish_s)
            if number not in self.plan.early:
                ops.append(Launch(self.gather(number)))
        whole_bytes = sum(self.stepped_bytes[number] for number in self.plan.all_reduced)
        return [*ops, *computed(STEP, self._per_byte_s * whole_bytes * self.plan.world_size)]


def computed(kind: str, seconds: float) -> list[Op]:
    """Returns computing, if it takes any time."""
    return [Compute(kind, seconds)] if seconds else []
