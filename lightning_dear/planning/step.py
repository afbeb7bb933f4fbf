"""Simulates steps: lists of operations that every rank does, and a clock that runs them.

An operation computes, launches a collective, or waits for a collective. Planners and the simulator
both make such lists from plans and run them here, so that a prediction and a simulation of a plan
agree. All ranks do the same at the same time, so that one clock stands for all of them. Each rank
has one link (its connection to the network), which carries one collective at a time. In this module
a message is a collective. Nothing is computed or sent in reality.
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_dear.planning.measured import BucketCost, ModelTimes
from lightning_dear.planning.plan import BucketPlan

FORWARD, BACKWARD, STEP, CODEC = "forward", "backward", "step", "codec"
"""Kinds of `Compute` operations."""

REDUCE_SCATTER, ALL_GATHER, ALL_REDUCE = "reduce_scatter", "all_gather", "all_reduce"
"""Kinds of `Message`s."""


class Compute(NamedTuple):
    """Operation that keeps the rank busy for `seconds`.

    Attributes:
        kind: Kind of computing, such as `FORWARD`.
        seconds: Seconds that the operation takes.
        at_s: Seconds of the model's own computing in this forward or backward that are done when
            the operation ends. None means that the operation is no computing of the model and
            delays it, such as encoding, or that it is neither in a forward nor in a backward.
    """

    kind: str
    seconds: float
    at_s: float | None = None


class Phase(NamedTuple):
    """Operation that marks the beginning (`begins`) or the end of a phase: a forward or a backward.

    Takes no time. Within a phase, the clock is computed as the phase's beginning + the model's own
    computing done so far + delays. Adding up all operations one by one would round differently for
    each plan, so that equally good plans would get different predictions.
    """

    begins: bool


class Message(NamedTuple):
    """Describes a collective of all ranks, which the link carries after its launch.

    Attributes:
        kind: Kind of collective, such as `REDUCE_SCATTER`.
        number: Number among the collectives of its kind in a step, usually the bucket number.
        seconds: Seconds for which the collective occupies the link.
        nbytes: Bytes that a rank sends.
        priority: Of several collectives that may begin, the link carries the one with the lowest
            priority number first. Of equal ones it carries the one that could begin first.
        tail_s: Seconds until the collective has ended, after the link has carried it. Meanwhile the
            link carries the next one.
    """

    kind: str
    number: int
    seconds: float
    nbytes: float = 0.0
    priority: int = 0
    tail_s: float = 0.0

    @property
    def key(self) -> tuple[str, int]:
        """Returns (kind, number), by which `Wait` names the collective."""
        return self.kind, self.number


class Launch(NamedTuple):
    """Operation that launches a collective; takes no time."""

    message: Message


class Wait(NamedTuple):
    """Operation that waits until a collective has ended.

    Attributes:
        key: Key of the collective: see `Message.key`.
        from_last_step: Whether the collective was launched by the step before. If so, the first
            step, number 0, does not wait.
    """

    key: tuple[str, int]
    from_last_step: bool = False


Op = Compute | Phase | Launch | Wait


class Program(NamedTuple):
    """Describes a step, which is the same on each rank: forward, backward and optimizer step.

    With local steps it describes a round of steps, which is repeated as others repeat a step.

    Attributes:
        name: Name of the program, for people.
        ops: Operations in the order in which every rank does them.
        num_steps: Number of steps that the operations make.
    """

    name: str
    ops: tuple[Op, ...]
    num_steps: int = 1

    @property
    def messages(self) -> list[Message]:
        """Returns the collectives of all operations, in the order of their launches."""
        return [op.message for op in self.ops if isinstance(op, Launch)]

    @property
    def sent_bytes(self) -> float:
        """Returns the bytes that a rank sends in a step, on the average."""
        return sum(message.nbytes for message in self.messages) / self.num_steps


def interleaved(
    kind: str, length_s: float, events: Iterable[tuple[float, Sequence[Op]]]
) -> list[Op]:
    """Returns a phase: the model's computing, interrupted by other operations at given times.

    Args:
        kind: Kind of the computing: `FORWARD` or `BACKWARD`.
        length_s: Seconds of the model's computing in sum.
        events: Pairs (seconds of computing that are done before the operations, operations), in any
            order. More seconds than `length_s` mean the end of the computing.
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


# --- running operations ---------------------------------------------------------------------------


class Carried(NamedTuple):
    """Describes a collective that the link has carried.

    Attributes:
        step: Number of the step that launched it.
        lane: Kind of the collective.
        bucket: `Message.number` of the collective, usually the bucket number.
        begin_s: Seconds from the beginning of the first step until the link began to carry the
            collective.
        end_s: Seconds from the beginning of the first step until the link had carried it.
    """

    step: int
    lane: str
    bucket: int
    begin_s: float
    end_s: float


class Busy(NamedTuple):
    """Describes a time span in which a rank computed, or waited for a collective.

    Attributes:
        step: Number of the step.
        kind: Kind of computing, or kind of the collective that the rank waited for.
        begin_s: Beginning of the time span, in seconds since the first step began.
        end_s: End of the time span, in seconds since the first step began.
        is_wait: Whether the rank waited. If not, it computed.
    """

    step: int
    kind: str
    begin_s: float
    end_s: float
    is_wait: bool = False


class LinkQueue:
    """Simulates the link, which carries launched collectives one at a time.

    The next collective is the one with the lowest priority number among those that may begin; of
    equal ones the one that could begin first. A collective that has begun is not interrupted. So
    times are computed only up to the collective whose end is asked for: a later launch cannot
    change them.

    Attributes:
        spans: Collectives carried so far, in order.
    """

    def __init__(self) -> None:
        self.spans: list[Carried] = []
        self._free_s = 0.0
        self._count = 0
        # (step number, key of the collective) -> end.
        self._ends_s: dict[tuple[int, tuple[str, int]], float] = {}
        # `_coming` is ordered by the time at which a collective may begin. Once the time has come,
        # the collective moves to `_waiting`, which is ordered by priority.
        self._coming: list[tuple[float, int, int, Message]] = []
        self._waiting: list[tuple[int, float, int, int, Message]] = []

    def launch(self, step: int, message: Message, ready_s: float) -> None:
        """Adds a collective that the ranks have launched.

        Args:
            step: Number of the step that launched it.
            message: The collective.
            ready_s: Time of the launch, in seconds since the first step began.
        """
        self._count += 1
        heapq.heappush(self._coming, (ready_s, self._count, step, message))

    def end_s(self, step: int, key: tuple[str, int]) -> float:
        """Returns the time at which a collective ends, in seconds since the first step began.

        All collectives that could begin before this end must have been launched by then.

        Args:
            step: Number of the step that launched the collective.
            key: Key of the collective.

        Raises:
            KeyError: If the collective was not launched.
        """
        while (step, key) not in self._ends_s:
            if not self._waiting and not self._coming:
                raise KeyError(f"{key[0]} {key[1]} of step {step} was never launched. Launch it.")
            self._carry_next()
        return self._ends_s[step, key]

    def _carry_next(self) -> None:
        """Carries the next collective to its end, and adds it to `spans`."""
        begin_s = self._free_s
        if not self._waiting:
            begin_s = max(begin_s, self._coming[0][0])
        while self._coming and self._coming[0][0] <= begin_s:
            ready_s, count, step, message = heapq.heappop(self._coming)
            heapq.heappush(self._waiting, (message.priority, ready_s, count, step, message))
        *_, step, message = heapq.heappop(self._waiting)
        end_s = self._free_s = begin_s + message.seconds
        self.spans.append(Carried(step, *message.key, begin_s, end_s))
        self._ends_s[step, message.key] = end_s + message.tail_s


class Run:
    """Simulates the operations of steps, one after the other, on the clock of all ranks.

    Attributes:
        clock_s: Seconds since the first step began.
        link: Simulated link, which carries the collectives.
        busy: Time spans in which a rank computed or waited so far.
    """

    def __init__(self) -> None:
        self.clock_s = 0.0
        self.link = LinkQueue()
        self.busy: list[Busy] = []
        # Beginning of the phase (None between phases), the time at which the rank would have
        # reached this operation without delays, and the sum of the delays in the phase.
        self._begin_s: float | None = None
        self._due_s = self._delay_s = 0.0

    def do(self, step: int, ops: Iterable[Op]) -> None:
        """Runs operations of step number `step`, and so moves the clock on. Steps count from 0."""
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


# --- making operations from a plan ----------------------------------------------------------------


@dataclass(eq=False)
class PlannedStep(ABC):
    """Makes the operations of a step from a plan; subclasses say what collectives cost.

    Attributes:
        plan: Plan of the step.
        times: Times at which gradients come and tensors are read.
        costs: Costs of encoding and decoding of each bucket, in the order of bucket numbers.
        step_s: Seconds in which a rank steps its shards of all buckets, after backward.
        late_step_s: Seconds in which a rank steps all buckets, if every rank steps whole buckets.
            Each bucket is then stepped in forward, before its first read. 0 otherwise.
        stepped_bytes: Bytes of each bucket that the optimizer steps: all except padding.
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
        """Returns the reduce-scatter of bucket `number`, or its all-reduce if it is all-reduced."""

    @abstractmethod
    def gather(self, number: int) -> Message:
        """Returns the all-gather of bucket `number`."""

    def forward(self) -> list[Op]:
        """Returns the operations of forward.

        Before its first read, each bucket that is gathered is waited for and decoded. If every rank
        steps whole buckets, it is then stepped.
        """
        buckets, gathered = self.plan.buckets, self.plan.gather_order
        events = [(self.times.first_use_of(buckets[n]), self.before_use(n)) for n in gathered]
        return interleaved(FORWARD, self.times.forward_s, events)

    def before_use(self, number: int) -> list[Op]:
        """Returns the operations that come in forward right before the first read of a bucket.

        They wait for the bucket's all-gather, which the step before has launched, and decode the
        bucket. If every rank steps whole buckets, they also step it.

        Args:
            number: Bucket number.
        """
        decoding = computed(CODEC, self.costs[number].decode_s)
        stepping = computed(STEP, self._late_per_byte_s * self.stepped_bytes[number])
        return [Wait((ALL_GATHER, number), from_last_step=True), *decoding, *stepping]

    def backward(self) -> list[Op]:
        """Returns the operations of backward.

        Each bucket is encoded, and its reduction launched, once its last gradient is there and the
        buckets before it in reduce order are launched.
        """
        ready_s, events = 0.0, []
        for number in self.plan.reduce_order:
            ready_s = max(ready_s, self.times.ready_of(self.plan.buckets[number]))
            ops = [*computed(CODEC, self.costs[number].encode_s), Launch(self.reduce(number))]
            events.append((self.launched_s(ready_s), ops))
        return interleaved(BACKWARD, self.times.backward_s, events)

    def launched_s(self, ready_s: float) -> float:
        """Returns the time in backward at which a bucket is encoded and launched.

        That is `ready_s` in this base class; subclasses may delay it.

        Args:
            ready_s: Seconds of the backward after which all gradients of the bucket are there.
        """
        return ready_s

    def reduced(self) -> list[Op]:
        """Returns the operations that wait for, decode and sum each bucket, in reduce order.

        They come after backward.
        """
        ops: list[Op] = []
        for number in self.plan.reduce_order:
            is_whole = number in self.plan.all_reduced
            ops.append(Wait((ALL_REDUCE if is_whole else REDUCE_SCATTER, number)))
            ops += computed(CODEC, self.costs[number].sum_s)
        return ops

    def stepped(self) -> list[Op]:
        """Returns the operations of the optimizer step: step and encode each shard, launch gathers.

        All-reduced buckets come last, since no other rank waits for them. Every rank steps all of
        their elements, and they are not gathered.
        """
        ops: list[Op] = []
        for number in self.plan.gather_order:
            ops += computed(STEP, self._per_byte_s * self.stepped_bytes[number])
            ops += computed(CODEC, self.costs[number].publish_s)
            ops.append(Launch(self.gather(number)))
        whole_bytes = sum(self.stepped_bytes[number] for number in self.plan.all_reduced)
        return [*ops, *computed(STEP, self._per_byte_s * whole_bytes * self.plan.world_size)]


def computed(kind: str, seconds: float) -> list[Op]:
    """Returns a list with a `Compute` operation. It is empty if the operation takes no time."""
    return [Compute(kind, seconds)] if seconds else []
