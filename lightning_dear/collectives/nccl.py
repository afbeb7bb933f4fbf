"""Collectives on NCCL: the backend's own reduce-scatter and all-gather.

NCCL matches messages by their order, so all ranks must launch in one order over all process groups.
This is the order of one optimizer's step. A test compares it with what a step launches on a
simulated device (tests/streams/test_launch_order.py):

    launched                                        group    in which order, and when
    ----------------------------------------------  -------  -------------------------------------
    weights of batches, if they have any            reduce   when the step's last backward begins
    gradients of each bucket                        reduce   reduce order; in backward, once full,
                                                             the rest of them before the step
    module buffers, as one message of bytes         gather   after all gradients, if a forward has
                                                             run since the last such broadcast
    flags: used, late, notes, inf                   reduce   after the module buffers
    second factors of each bucket (PowerSGD)        reduce   reduce order, after the flags
    new regions, if they are due (static Ok-Topk)   reduce   once all buckets' means have arrived
    parameters, or means, of each bucket            gather   gather order, while the step goes on

Gradients that no optimizer holds are averaged right after backward, in the reduce group: flags, and
then a message for each dtype. If there are any, the first four rows come before them.

Calls of the user launch more, after the means have arrived and before the last row: a norm (one
message in the gather group), GradScaler's unscaling (one in the reduce group), and whole gradients
(one gather of each bucket, and flags in the reduce group when they are taken back).

With several optimizers, the order in which the user calls them counts. If the first is stepped
before the second is clipped, unscaled or stepped, all rows of the first come before those of the
second. If the user clips or unscales both before stepping, all rows but the last of both come
first, and then the last row of each.

A gradient is late if it comes after its bucket was launched. It needs another round, which repeats
three rows: gradients, flags and second factors. On NCCL late gradients raise an error: ranks would
learn of another round from the flags. There the host reads flags only if a parameter is not USED on
this rank or if ranks vote (see `BucketRound`), since reading them blocks it.
"""

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_dear import private_names
from lightning_dear.collectives.shards import SUMMED_IN_FP32, shard_of, sum_in_source_order
from lightning_dear.collectives.work import Collectives, SplitTensor, Waits, Work

# torch 2.13 renamed both functions. There the old names warn. Earlier versions have no new names.
_IS_RENAMED = hasattr(dist, "reduce_scatter_single")
REDUCE_SCATTER = "reduce_scatter_single" if _IS_RENAMED else "reduce_scatter_tensor"
ALL_GATHER = "all_gather_single" if _IS_RENAMED else "all_gather_into_tensor"


class NativeCollectives(Collectives):
    """The backend's own reduce-scatter and all-gather (NCCL). A wait does not block the host.

    NCCL runs a collective after the kernels that are on the launching stream, and `wait` makes the
    current stream wait for the collective. All ranks launch in one order, since launches follow the
    plan: usually first all reduce-scatters of a step, then module buffers, the flags, and the
    all-gathers. The docstring of this module has the whole order.
    """

    wait_blocks_host = matches_by_tag = has_variable_lengths = False

    @property
    @override
    def flags_device(self) -> torch.device:
        return self.streams.device

    @override
    def abort(self) -> None:
        self.was_aborted = True
        # Also the default group, in which a forward may wait for other ranks, or a loss that is
        # logged.
        groups = *self.device_groups, self.calls.group.WORLD
        # If torch cannot abort, or has done so already, waits end with the timeout.
        with suppress(Exception):
            cuda = torch.device("cuda")
            backends = [private_names.GET_BACKEND.of(group)(cuda) for group in groups]
            # All within one NCCL group start and end: one abort alone might wait for another.
            private_names.NCCL_GROUP_START.of(backends[0])()
            for backend in backends:
                with suppress(Exception):
                    backend.abort()
            private_names.NCCL_GROUP_END.of(backends[0])()

    @override
    def start(self, call: str, group: Any, *arguments: Any, tag: int = 0) -> Waits:
        """Sends complex tensors as pairs of real numbers, since NCCL sends no others."""
        return super().start(call, group, *map(_as_real, arguments), tag=tag)

    def start_together(
        self, call: str, group: Any, pairs: Sequence[tuple[Tensor, Tensor]], tag: int
    ) -> Waits:
        """Launches `call` for all pairs (output, input): as one kernel if this torch can do that.

        Returns:
            Waits for all of them.
        """
        manager = getattr(self.calls, private_names.COALESCING.name, None)
        with nullcontext() if manager is None else manager(group, async_ops=True) as together:
            parts = [self.start(call, group, *both, tag=tag) for both in pairs]
        if together is None:
            return [*chain(*parts)]
        # torch's manager takes no time limit. A part of one kernel has no work of its own, but its
        # tensors must be held all the same.
        return [(None, SimpleNamespace(wait=lambda *_: together.wait()), parts)]

    @override
    def launch_reduce_scatter(
        self, buffer: Tensor, received: Tensor, out: Tensor, tag: int
    ) -> Work:
        own = shard_of(buffer, self.world.rank, self.world.size)
        if self.sums_in_fp32 and buffer.dtype in SUMMED_IN_FP32:
            # As many bytes as a reduce-scatter sends. The sum is rounded once.
            incoming = received.view(self.world.size, -1)
            finish = partial(sum_in_source_order, [*incoming], out)
            return self.launch_all_to_all(buffer.view_as(incoming), incoming, tag).then(finish)
        waits = self.start(REDUCE_SCATTER, self.reduce_group, own, buffer, tag=tag)
        self.ledger["reduce_scatter"] += self.ring_bytes(buffer)
        copy = None if out.dtype == own.dtype else partial(out.copy_, own)
        return self.new_work("reduce_scatter", f"bucket {tag}", waits, copy)

    @override
    def scratch_numel(self, numel: int) -> int:
        return numel if self.sums_in_fp32 else 0

    @override
    def launch_all_to_all(self, rows: Tensor, incoming: Tensor, tag: int) -> Work:
        waits = self.start("all_to_all_single", self.reduce_group, incoming, rows, tag=tag)
        self.ledger["reduce_scatter"] += self.ring_bytes(rows)
        return self.new_work("reduce_scatter", f"bucket {tag}", waits)

    @override
    def launch_parts(self, outgoing: SplitTensor, incoming: SplitTensor, tag: int) -> Work:
        both = incoming[0], outgoing[0], incoming[1], outgoing[1]
        waits = self.start("all_to_all_single", self.gather_group, *both, tag=tag)
        self.ledger["all_gather"] += outgoing[0].nbytes
        return self.new_work("all_gather", f"bucket {tag}", waits)

    @override
    def launch_all_gather(self, buffer: Tensor, tag: int) -> Work:
        own = shard_of(buffer, self.world.rank, self.world.size)
        waits = self.start(ALL_GATHER, self.gather_group, buffer, own, tag=tag)
        self.ledger["all_gather"] += self.ring_bytes(buffer)
        return self.new_work("all_gather", f"bucket {tag}", waits)

    @override
    def launch_max(self, flags: Tensor, tag: int = -1) -> Work:
        waits = self.start("all_reduce", self.reduce_group, flags, dist.ReduceOp.MAX)
        self.ledger["other"] += 2 * self.ring_bytes(flags)
        return self.new_work("other", "used parameters", waits)

    @override
    def launch_broadcast(self, buffer: Tensor, index: int) -> Work:
        waits = self.start("broadcast", self.gather_group, buffer, 0, tag=index)
        self.ledger["other"] += buffer.nbytes
        return self.new_work("other", "module buffers", waits)


def _as_real(argument: Any) -> Any:
    """Returns a complex tensor, or those of a list, as real numbers. Others stay as they are.

    torch does the same in most of its calls, but not in `reduce_scatter_single`.
    """
    if isinstance(argument, list):
        return [_as_real(one) for one in argument]
    is_complex = isinstance(argument, Tensor) and argument.is_complex()
    return torch.view_as_real(argument) if is_complex else argument
