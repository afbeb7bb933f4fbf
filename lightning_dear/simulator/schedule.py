"""From a plan to a program: when buckets are launched, stepped and waited for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from lightning_dear.planning import BucketPlan
from lightning_dear.planning.measured import BucketCost
from lightning_dear.simulator.network import Network
from lightning_dear.simulator.program import (
    ALL_GATHER,
    ALL_REDUCE,
    BACKWARD,
    CODEC,
    FORWARD,
    REDUCE_SCATTER,
    STEP,
    Compute,
    Launch,
    Message,
    Op,
    Program,
    Wait,
    interleaved,
)
from lightning_dear.simulator.workload import Workload

Gathers = Literal["stepped", "one_ahead", "at_once"]
"""When all-gathers are launched.

stepped: each as soon as its bucket is stepped.
one_ahead: when all buckets are stepped the first, and each other one where forward gets to the
    bucket before it.
at_once: when all buckets are stepped, and nothing is computed until all have ended.
"""


@dataclass(frozen=True)
class Schedule:
    """What a strategy does with the buckets of a plan; the default is `DearStrategy`'s.

    Attributes:
        gathers: When all-gathers are launched.
        steps_late: Whether every rank steps whole buckets where forward first reads them, of
            gradients that were gathered, as DeAR was published.
        cycle_s: Between the times when buckets are launched, as Horovod's cycles; 0: at once.
        uses_the_backends: Whether reduce-scatters and all-gathers are the backend's own; see
            `Network.has_reduce_scatter`.
        shards_tensors: Whether every tensor is sharded by itself, and not a bucket of them; see
            `Workload.sharding_s` and `Network.sharded_tensor_s`.
        is_ddp: Whether forward waits for rank 0's module buffers, and gradients are copied into
            buckets and back; see `Workload.buffers_s` and `copies_s`.
    """

    gathers: Gathers = "stepped"
    steps_late: bool = False
    cycle_s: float = 0.0
    uses_the_backends: bool = False
    shards_tensors: bool = False
    is_ddp: bool = False

    def program(self, plan: BucketPlan, workload: Workload, network: Network) -> Program:
        """The steady-state step of `plan`, which must be one for `network`'s ranks."""
        return _Builder(self, plan, workload, network).program()


class _Builder:
    def __init__(
        self, schedule: Schedule, plan: BucketPlan, workload: Workload, network: Network
    ) -> None:
        self._schedule, self._plan, self._network = schedule, plan, network
        self._workload, self._times = workload, workload.times
        self._costs = workload.codecs.of_all(plan)
        self._nbytes = [bucket.nbytes for bucket in plan.buckets]
        stepped = [bucket.stepped_bytes for bucket in plan.buckets]
        if len(plan.all_reduced) == len(plan.buckets):
            # As others' all-reduces, which need no equal shards.
            self._nbytes = stepped
        per_byte_s = workload.times.step_s / max(sum(stepped), 1)
        self._step_s = [per_byte_s * size for size in stepped]
        # All but the early ones, in the order in which forward needs them.
        self._gathered = [n for n in plan.gather_order if n not in plan.early]

    def program(self) -> Program:
        ops = [*self._forward(), *self._backward(), *self._reduced(), *self._step()]
        ops = [op for op in ops if not isinstance(op, Compute) or op.seconds]
        if self._lacks_reduce_scatter:
            ops = [one for op in ops for one in _blocking(op)]
        return Program(self._plan.name, tuple(ops), self._memory_bytes())

    @property
    def _lacks_reduce_scatter(self) -> bool:
        return self._schedule.uses_the_backends and not self._network.has_reduce_scatter

    # --- forward ----------------------------------------------------------------------------------

    def _forward(self) -> list[Op]:
        uses = sorted(
            (self._times.first_use_of(bucket), number)
            for number, bucket in enumerate(self._plan.buckets)
            if number not in self._plan.all_reduced
        )
        is_late = self._schedule.gathers == "at_once"
        events = [(0.0 if is_late else at_s, self._before_use(number)) for at_s, number in uses]
        held_up_s = self._workload.buffers_s if self._is_ddp else 0.0
        return [
            Compute(FORWARD, held_up_s),
            *interleaved(FORWARD, self._times.forward_s, events),
        ]

    @property
    def _is_ddp(self) -> bool:
        return self._schedule.is_ddp and self._plan.world_size > 1

    def _before_use(self, number: int) -> list[Op]:
        ops: list[Op] = [Wait((ALL_GATHER, number), from_last_step=True)]
        if self._schedule.gathers == "one_ahead":
            place = self._gathered.index(number)
            ops = [Wait((ALL_GATHER, number), from_last_step=place == 0)]
            ops += [self._gather(ahead) for ahead in self._gathered[place + 1 : place + 2]]
        ops.append(Compute(CODEC, self._costs[number].decode_s))
        if self._schedule.steps_late:
            ops.append(Compute(STEP, self._step_s[number]))
        return ops

    # --- backward ---------------------------------------------------------------------------------

    def _backward(self) -> list[Op]:
        ready_s, events = 0.0, []
        followers = self._early_after()
        for number in self._plan.reduce_order:
            ready_s = max(ready_s, self._times.ready_of(self._plan.buckets[number]))
            ops: list[Op] = [Compute(CODEC, self._costs[number].encode_s), self._reduce(number)]
            ops += [self._gather(early, after=number) for early in followers.get(number, ())]
            events.append((self._launched_s(ready_s), ops))
        return interleaved(BACKWARD, self._times.backward_s, events)

    def _launched_s(self, ready_s: float) -> float:
        cycle_s = self._schedule.cycle_s
        return ready_s if not cycle_s else -(-ready_s // cycle_s) * cycle_s

    def _early_after(self) -> dict[int, list[int]]:
        """Bucket whose reduce-scatter ends last -> early gathers that then may begin, in order."""
        order = {number: place for place, number in enumerate(self._plan.reduce_order)}
        followers: dict[int, list[int]] = {}
        last = None
        for number in self._plan.early:
            last = number if last is None else max(last, number, key=order.__getitem__)
            followers.setdefault(last, []).append(number)
        return followers

    def _reduce(self, number: int) -> Launch:
        cost = self._costs[number]
        if number in self._plan.all_reduced:
            return self._all_reduce(number, cost)
        size, starts = cost.reduce_bytes, cost.reduce_starts
        if self._schedule.uses_the_backends:
            travelling = 2 * size if self._lacks_reduce_scatter else size
            seconds = self._network.reduce_scatter_s(size)
            return self._launch(REDUCE_SCATTER, number, seconds, travelling)
        is_own = cost.way == "to_owners"
        if is_own:
            seconds = self._network.all_to_all_s(size, starts, self._nbytes[number])
        else:
            seconds = self._network.half_s(size, starts)
        return self._launch(REDUCE_SCATTER, number, seconds, size)

    def _all_reduce(self, number: int, cost: BucketCost) -> Launch:
        size, starts = cost.reduce_bytes, cost.reduce_starts
        if cost.way == "all_gather":
            return self._launch(ALL_REDUCE, number, self._network.half_s(size, starts), size)
        if cost.way == "both_halves":
            seconds = self._network.all_to_all_s(size, starts)
            seconds += self._network.half_s(cost.gather_bytes)
            return self._launch(ALL_REDUCE, number, seconds, size + cost.gather_bytes)
        if cost.way == "half":
            # Nothing is encoded; 16-bit gradients are all-reduced in fp32.
            size = self._nbytes[number] * max(4 / self._plan.buckets[number].itemsize, 1)
        return self._launch(ALL_REDUCE, number, self._network.all_reduce_s(size), 2 * size)

    def _gather(self, number: int, after: int | None = None) -> Launch:
        size = self._costs[number].gather_bytes
        is_own = not self._schedule.uses_the_backends
        seconds = self._network.half_s(size) if is_own else self._network.all_gather_s(size)
        if self._costs[number].way == "all_gather":
            # The first half has brought all that there is.
            seconds = 0.0
        launch = self._launch(ALL_GATHER, number, seconds, size)
        if after is None:
            return launch
        return Launch(replace(launch.message, after=(REDUCE_SCATTER, after)))

    def _launch(self, kind: str, number: int, seconds: float, size: float) -> Launch:
        return Launch(Message(kind, number, seconds, self._network.sent_bytes(size)))

    # --- the optimizer's step ---------------------------------------------------------------------

    def _reduced(self) -> Iterator[Op]:
        for number in self._plan.reduce_order:
            is_whole = number in self._plan.all_reduced
            yield Wait((ALL_REDUCE if is_whole else REDUCE_SCATTER, number))
            yield Compute(CODEC, self._costs[number].sum_s)

    def _step(self) -> list[Op]:
        steps, gathers = list[Op](), list[Op]()
        for number in range(len(self._plan.buckets)):
            if number in self._plan.all_reduced:
                continue
            if not self._schedule.steps_late:
                steps.append(Compute(STEP, self._step_s[number] / self._plan.world_size))
            steps.append(Compute(CODEC, self._costs[number].publish_s))
            if number in self._gathered:
                is_own = self._schedule.gathers == "stepped"
                (steps if is_own else gathers).append(self._gather(number))
        if self._schedule.gathers == "one_ahead":
            gathers = gathers[:1]
        whole_s = sum(self._step_s[number] for number in self._plan.all_reduced)
        rest_s = max(self._workload.codecs.unseen_s, 0.0)
        fixed = Compute(STEP, self._workload.fixed_step_s + self._host_s())
        return [fixed, *steps, Compute(STEP, whole_s), Compute(CODEC, rest_s), *gathers]

    def _host_s(self) -> float:
        """Of others' work on tensors and units, which nothing hides; ours has none."""
        if self._is_ddp:
            return self._network.host_growth * self._workload.copies_s
        if not self._schedule.shards_tensors or self._plan.world_size == 1:
            return 0.0
        if self._workload.sharding_s is not None:
            return self._network.host_growth * self._workload.sharding_s
        return self._network.sharded_tensor_s * len(self._workload.tensors)

    def _memory_bytes(self) -> dict[str, float]:
        padded, world_size = sum(self._nbytes), self._plan.world_size
        whole = sum(self._nbytes[number] for number in self._plan.all_reduced)
        sharded = (padded - whole) / world_size
        stepped_whole = padded if self._schedule.steps_late else whole
        gradients: float = padded
        buffers: float = sharded
        if self._schedule.uses_the_backends:
            # ZeRO-2 keeps a shard of the gradients, and one bucket's while it is reduced.
            gradients, buffers = sharded, max(self._nbytes)
        elif whole == padded:
            # DDP's buckets, beside the gradients.
            buffers = whole
        if world_size == 1:
            gradients, buffers = padded, 0
        share = (padded - stepped_whole) / world_size
        return {
            "parameters": padded,
            "gradients": gradients,
            "optimizer state": self._workload.state_bytes * (stepped_whole + share),
            "buffers": buffers + sum(self._nbytes[number] for number in self._plan.early),
            "residuals": sum(map(self._kept_bytes, range(len(self._plan.buckets)))),
        }

    def _kept_bytes(self, number: int) -> float:
        numel = self._nbytes[number] / self._plan.buckets[number].itemsize
        return numel * self._workload.codecs.of(self._plan, number).kept_bytes


def _blocking(op: Op) -> list[Op]:
    return [op, Wait(op.message.key)] if isinstance(op, Launch) else [op]
