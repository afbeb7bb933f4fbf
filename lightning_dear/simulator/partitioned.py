"""Priority scheduling of cut tensors (ByteScheduler, SOSP'19)."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_dear.planning import TensorSpec
from lightning_dear.simulator.network import Network
from lightning_dear.simulator.program import (
    ALL_REDUCE,
    BACKWARD,
    FORWARD,
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

PARTITION_MB = 4.0
_MIB = 1 << 20
_MAX_PARTS = 1 << 12


def partitioned_program(
    workload: Workload, network: Network, partition_mb: float = PARTITION_MB
) -> Program:
    """Every tensor in parts of `partition_mb`, all-reduced; what forward needs first goes first.

    A part that is under way is not broken off. Each tensor is stepped, whole and by every rank,
    where the next forward first reads it.
    """
    times, tensors = workload.times, workload.tensors
    parts = {one.index: _parts(one, partition_mb) for one in tensors}
    needs = sorted((times.first_use_s.get(t.index, times.forward_s), t.index) for t in tensors)
    urgency = {index: place for place, (_, index) in enumerate(needs)}
    per_byte_s = times.step_s / max(workload.nbytes, 1)

    def use(tensor: TensorSpec) -> Iterator[Op]:
        for number in range(len(parts[tensor.index])):
            key = (ALL_REDUCE, _MAX_PARTS * tensor.index + number)
            yield Wait(key, from_last_step=True)
        yield Compute(STEP, per_byte_s * tensor.numel * tensor.itemsize)

    def send(tensor: TensorSpec) -> Iterator[Op]:
        for number, size in enumerate(parts[tensor.index]):
            yield Launch(
                Message(
                    ALL_REDUCE,
                    _MAX_PARTS * tensor.index + number,
                    network.all_reduce_s(size),
                    2 * network.sent_bytes(size),
                    priority=urgency[tensor.index],
                )
            )

    forward = [
        (times.first_use_s.get(one.index, times.forward_s), list(use(one))) for one in tensors
    ]
    backward = [
        (times.ready_s.get(one.index, times.backward_s), list(send(one))) for one in tensors
    ]
    ops = [
        *interleaved(FORWARD, times.forward_s, forward),
        *interleaved(BACKWARD, times.backward_s, backward),
        Compute(STEP, workload.fixed_step_s),
    ]
    size = workload.nbytes
    memory = {"parameters": size, "gradients": size, "optimizer state": workload.state_bytes * size}
    return Program(f"parts of {partition_mb:g} MiB", tuple(ops), memory)


def _parts(tensor: TensorSpec, partition_mb: float) -> list[float]:
    size = tensor.numel * tensor.itemsize
    count = max(-(-size // (partition_mb * _MIB)), 1)
    return [size / count] * int(count)
