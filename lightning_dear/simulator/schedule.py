"""Turns a plan into a program: the operations of a step under a strategy, with their costs."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Literal

from typing_extensions import override

from lightning_dear.planning import BucketPlan, NoFusion, TensorSpec
from lightning_dear.planning import step as steps
from lightning_dear.planning.step import Compute, Launch, Message, Op, PlannedStep, Program, Wait
from lightning_dear.simulator.network import Network
from lightning_dear.simulator.workload import Workload, module_of

if TYPE_CHECKING:
    from lightning_dear.local_steps import LocalSteps

Gathers = Literal["stepped", "one_ahead", "at_once"]
"""When all-gathers are launched.

stepped: Each one as soon as its bucket has been stepped.
one_ahead: The first one when all buckets have been stepped; each other one when forward reaches the
    bucket before it.
at_once: All of them when all buckets have been stepped. Forward begins when all have ended.
"""

PARTITION_MB = 4.0
_MIB = 1 << 20
_MAX_PARTS = 1 << 12


@dataclass(frozen=True)
class Schedule:
    """How a strategy exchanges and steps the buckets of a plan; the default is `DearStrategy`'s.

    Attributes:
        gathers: When all-gathers are launched.
        steps_late: Whether mean gradients are gathered, and every rank then steps whole buckets
            when forward first reads them, as in the DeAR paper.
        cycle_s: Seconds between the times at which buckets are launched, as Horovod's cycles. 0
            means that a bucket is launched as soon as it is full.
        uses_the_backends: Whether reduce-scatters and all-gathers are the backend's own; see
            `Network.has_reduce_scatter`.
        shards_tensors: Whether every tensor is sharded by itself instead of a whole bucket; see
            `Workload.sharding_s` and `Network.sharded_tensor_s`.
        is_ddp: Whether gradients are copied into buckets and back; see `Workload.copies_s`.
    """

    gathers: Gathers = "stepped"
    steps_late: bool = False
    cycle_s: float = 0.0
    uses_the_backends: bool = False
    shards_tensors: bool = False
    is_ddp: bool = False

    def program(self, plan: BucketPlan, workload: Workload, network: Network) -> Program:
        """Return the steady-state step of `plan`, which must be for as many ranks as `network`."""
        return _SimulatedStep(self, plan, workload, network).program()


class _SimulatedStep(PlannedStep):
    """A step whose exchanges are launched by a schedule and cost what the network's model says."""

    def __init__(
        self, schedule: Schedule, plan: BucketPlan, workload: Workload, network: Network
    ) -> None:
        times, is_late = workload.times, schedule.steps_late
        step_s = 0.0 if is_late else times.step_s / plan.world_size
        late_step_s = times.step_s if is_late else 0.0
        super().__init__(plan, times, workload.codecs.of_all(plan), step_s, late_step_s)
        self._schedule, self._workload, self._network = schedule, workload, network
        self._nbytes = [bucket.nbytes for bucket in plan.buckets]
        if len(plan.all_reduced) == len(plan.buckets):
            # All-reduced buckets are not cut into equal shards, so they have no padding.
            self._nbytes = self.stepped_bytes
        self._is_ddp = schedule.is_ddp and plan.world_size > 1
        self._lacks_reduce_scatter = schedule.uses_the_backends and not network.has_reduce_scatter

    def program(self) -> Program:
        ops = [*self.forward(), *self.backward(), *self.reduced(), *self.stepped()]
        if self._lacks_reduce_scatter:
            ops = [one for op in ops for one in _blocking(op)]
        return Program(self.plan.name, tuple(ops))

    @override
    def forward(self) -> list[Op]:
        if self._schedule.gathers != "at_once":
            return super().forward()
        waits = [op for number in self.plan.gather_order for op in self.before_use(number)]
        return steps.interleaved(steps.FORWARD, self.times.forward_s, [(0.0, waits)])

    @override
    def before_use(self, number: int) -> list[Op]:
        ops = super().before_use(number)
        if self._schedule.gathers != "one_ahead":
            return ops
        order = self.plan.gather_order
        place = order.index(number)
        ahead = [Launch(self.gather(one)) for one in order[place + 1 : place + 2]]
        return [Wait((steps.ALL_GATHER, number), from_last_step=place == 0), *ahead, *ops[1:]]

    @override
    def launched_s(self, ready_s: float) -> float:
        cycle_s = self._schedule.cycle_s
        return ready_s if not cycle_s else -(-ready_s // cycle_s) * cycle_s

    @override
    def stepped(self) -> list[Op]:
        fixed = steps.computed(steps.STEP, self._workload.fixed_step_s + self._host_s())
        ops = [*fixed, *super().stepped()]
        ops += steps.computed(steps.CODEC, max(self._workload.codecs.unseen_s, 0.0))
        if self._schedule.gathers == "stepped":
            return ops
        gathers = [op for op in ops if isinstance(op, Launch)]
        first = gathers[:1] if self._schedule.gathers == "one_ahead" else gathers
        return [*(op for op in ops if not isinstance(op, Launch)), *first]

    def _host_s(self) -> float:
        """Return the host seconds of DDP's copies, or of FSDP2's sharded tensors, in a step.

        No computation hides them. `strategy="dear"` has none.
        """
        if self._is_ddp:
            return self._network.host_growth * self._workload.copies_s
        if not self._schedule.shards_tensors or self.plan.world_size == 1:
            return 0.0
        if self._workload.sharding_s is not None:
            return self._network.host_growth * self._workload.sharding_s
        return self._network.sharded_tensor_s * len(self._workload.tensors)

    # --- exchanges --------------------------------------------------------------------------------

    @override
    def reduce(self, number: int) -> Message:
        if number in self.plan.all_reduced:
            return self._all_reduce(number)
        cost, network = self.costs[number], self._network
        size, starts = cost.reduce_bytes, cost.reduce_starts
        if self._schedule.uses_the_backends:
            seconds = network.reduce_scatter_s(size)
            size *= 2 if self._lacks_reduce_scatter else 1
        elif cost.way == "to_owners":
            seconds = network.all_to_all_s(size, starts, self._nbytes[number])
        else:
            seconds = network.half_s(size, starts)
        return self._message(steps.REDUCE_SCATTER, number, seconds, size)

    def _all_reduce(self, number: int) -> Message:
        cost, network = self.costs[number], self._network
        size, starts = cost.reduce_bytes, cost.reduce_starts
        if cost.way == "all_gather":
            return self._message(steps.ALL_REDUCE, number, network.half_s(size, starts), size)
        if cost.way == "both_halves":
            seconds = network.all_to_all_s(size, starts) + network.half_s(cost.gather_bytes)
            return self._message(steps.ALL_REDUCE, number, seconds, size + cost.gather_bytes)
        if cost.way == "half":
            # "half" without a codec: an all-reduce of the gradients, 16-bit ones in fp32.
            size = self._nbytes[number] * max(4 / self.plan.buckets[number].itemsize, 1)
        return self._message(steps.ALL_REDUCE, number, network.all_reduce_s(size), 2 * size)

    @override
    def gather(self, number: int) -> Message:
        cost, network = self.costs[number], self._network
        gather_s = network.all_gather_s if self._schedule.uses_the_backends else network.half_s
        # With way "all_gather" the reduce half has already brought all ranks' bytes to all ranks.
        seconds = 0.0 if cost.way == "all_gather" else gather_s(cost.gather_bytes)
        return self._message(steps.ALL_GATHER, number, seconds, cost.gather_bytes)

    def _message(self, kind: str, number: int, seconds: float, size: float) -> Message:
        work, sent = self._work_of_host(kind, number, size), self._network.sent_bytes(size)
        seconds, tail_s = self._network.through_host(seconds, *work)
        return Message(kind, number, seconds, sent, tail_s=tail_s)

    def _work_of_host(self, kind: str, number: int, size: float) -> tuple[float, float, float]:
        """Return the bytes that go down and up the bus, and those that the host adds.

        Args:
            kind: Kind of the collective.
            number: Bucket number.
            size: Bytes of the whole message; of an all-reduce those of both halves.
        """
        network, nbytes = self._network, self._nbytes[number]
        shard = size / network.world_size
        way = self.costs[number].way
        # Every rank's encoded gradients come to every rank, which decodes them.
        is_decoded = kind == steps.ALL_REDUCE and way in ("all_gather", "both_halves")
        if kind == steps.ALL_GATHER or is_decoded:
            return shard, size, 0.0
        if kind == steps.ALL_REDUCE:
            return size / 2, size / 2, network.sent_bytes(size / 2)
        if way != "to_owners":
            return size, shard, network.sent_bytes(size)
        if network.algorithm != "two_hops" or network.ranks_in_node == 1:
            return size, size, 0.0
        # Gradients go down as they are. A host's sums go up to be encoded.
        sums = nbytes / network.ranks_in_node
        return nbytes + size, sums + size, nbytes - sums


def _blocking(op: Op) -> list[Op]:
    return [op, Wait(op.message.key)] if isinstance(op, Launch) else [op]


class _SimulatedRound(_SimulatedStep):
    """A round of local steps. Its buckets are the fragments: all of one size, and in fp32."""

    def __init__(self, options: "LocalSteps", workload: Workload, network: Network) -> None:
        self._round = options.schedule(len({*map(module_of, workload.tensors)}))
        turns = range(self._round.fragments)
        numel = -(-sum(one.numel for one in workload.tensors) // len(turns))
        fragments = [TensorSpec(turn, f"fragment {turn}", numel, 4, "", turn) for turn in turns]
        plan = NoFusion().plan(fragments, network.world_size)
        super().__init__(Schedule(), plan, workload, network)
        self._alone = single_program(workload, network).ops
        alone_s = sum(op.seconds for op in self._alone if isinstance(op, Compute))
        # Between two steps the outer optimizer steps what has arrived; at the merge at the latest.
        self._until_gather = min(ceil(self.reduce(0).seconds / alone_s), self._round.delay)

    @override
    def program(self) -> Program:
        every = self._round.every
        ops = tuple(op for step in range(1, every + 1) for op in self._step(step))
        return Program(f"round of {every} steps", ops, every)

    def _step(self, step: int) -> Iterator[Op]:
        # In later rounds than the first one no exchange is left out.
        later, delay, until = step + self._round.every, self._round.delay, self._until_gather
        yield from self._alone
        if (sent := self._round.sent_after(later)) is not None:
            yield from steps.computed(steps.CODEC, self.costs[sent].encode_s)
            yield Launch(self.reduce(sent))
        if (stepped := self._round.sent_after(later - until)) is not None:
            yield Launch(self.gather(stepped))
        if (merged := self._round.merged_after(later)) is not None:
            yield Wait((steps.REDUCE_SCATTER, merged), from_last_step=step <= delay)
            yield Wait((steps.ALL_GATHER, merged), from_last_step=step <= delay - until)
            cost = self.costs[merged]
            yield from steps.computed(steps.CODEC, cost.sum_s + cost.publish_s + cost.decode_s)


def round_program(options: "LocalSteps", workload: Workload, network: Network) -> Program:
    """Return the steady-state round of local steps, in which every rank steps all parameters.

    Fragments share the link. An all-gather is launched after a step, once a free link would have
    carried its reduce-scatter. The outer optimizer takes no time.
    """
    return _SimulatedRound(options, workload, network).program()


# --- without a plan -------------------------------------------------------------------------------


def single_program(workload: Workload, network: Network) -> Program:
    """Return the step of one rank alone, which sends nothing."""
    times = workload.times
    forward = Compute(steps.FORWARD, times.forward_s)
    backward = Compute(steps.BACKWARD, times.backward_s)
    step = Compute(steps.STEP, times.step_s + workload.fixed_step_s)
    return Program("one rank", (forward, backward, step))


def partitioned_program(workload: Workload, network: Network) -> Program:
    """Return a step that all-reduces every tensor in parts of `PARTITION_MB`, by priority.

    Tensors that forward reads first go first (ByteScheduler, SOSP'19). A part that has begun is not
    interrupted. Every rank steps each whole tensor when the next forward first reads it.
    """
    times, tensors = workload.times, workload.tensors
    reads_s = {one.index: times.first_use_s.get(one.index, times.forward_s) for one in tensors}
    ready_s = {one.index: times.ready_s.get(one.index, times.backward_s) for one in tensors}
    order = sorted(reads_s, key=lambda index: (reads_s[index], index))
    urgency = {index: place for place, index in enumerate(order)}
    per_byte_s = times.step_s / max(workload.nbytes, 1)

    def parts(tensor: TensorSpec) -> Iterator[Message]:
        count = int(max(-(-tensor.nbytes // (PARTITION_MB * _MIB)), 1))
        size = tensor.nbytes / count
        for number in range(_MAX_PARTS * tensor.index, _MAX_PARTS * tensor.index + count):
            sent = network.sent_bytes(size)
            seconds, tail_s = network.through_host(network.all_reduce_s(size), size, size, sent)
            place = urgency[tensor.index]
            yield Message(steps.ALL_REDUCE, number, seconds, 2 * sent, place, tail_s)

    def use(tensor: TensorSpec) -> list[Op]:
        waits = [Wait(part.key, from_last_step=True) for part in parts(tensor)]
        return [*waits, *steps.computed(steps.STEP, per_byte_s * tensor.nbytes)]

    forward = [(reads_s[one.index], use(one)) for one in tensors]
    backward = [(ready_s[one.index], list(map(Launch, parts(one)))) for one in tensors]
    ops = steps.interleaved(steps.FORWARD, times.forward_s, forward)
    ops += steps.interleaved(steps.BACKWARD, times.backward_s, backward)
    ops += steps.computed(steps.STEP, workload.fixed_step_s)
    return Program(f"parts of {PARTITION_MB:g} MiB", tuple(ops))
