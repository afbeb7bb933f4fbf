"""The order in which a step launches its collectives, for readers and for a test.

NCCL matches messages by their order, so all ranks must launch in one order over all process groups.
`launches_of_step` yields that order. A test compares it with what a step launches on a simulated
device (tests/streams/test_launch_order.py):

    launched                                        group    in which order, and when
    ----------------------------------------------  -------  -------------------------------------
    gradients of each bucket                        reduce   reduce order; in backward, once full,
                                                             the rest of them before the step
    module buffers, a message for each dtype        gather   after all gradients, once a forward
    flags: used, late, notes, inf                   reduce   after the module buffers
    second factors of each bucket (PowerSGD)        reduce   reduce order, after the flags
    new regions, if they are due (static Ok-Topk)   reduce   after the sums
    parameters, or means, of each bucket            gather   gather order, while the step goes on

The user's calls launch more between the sums and the gathers: a norm (one message in the gather
group), GradScaler's unscaling (one in the reduce group), and whole gradients (one gather of each
bucket, and flags in the reduce group when they are taken back).

With several optimizers, each launches all of its messages before the next one begins. Late
gradients need another round, which repeats all rows but the last. On NCCL they are refused, since
the host does not read flags there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lightning_dear.engine.active_plan import ActivePlan


class Launch(NamedTuple):
    """One call of a `launch_...` method of `Collectives`.

    Attributes:
        group: Process group of the message: "reduce" or "gather".
        call: Name of the method without "launch_".
        bucket: Bucket number. None means that the message belongs to no single bucket.
    """

    group: str
    call: str
    bucket: int | None = None


def launches_of_step(active: ActivePlan, num_buffers: int) -> Iterator[Launch]:
    """Yields one optimizer's launches in one step, without those of the user's calls.

    Args:
        active: The present plan, after the step.
        num_buffers: Number of messages for module buffers. 0 if an earlier step has sent them since
            the last forward.
    """
    buckets, order = active.flat.buckets, active.plan.reduce_order
    calls = {number: active.exchange.reduce_calls(buckets[number]) for number in order}
    yield from (Launch("reduce", calls[number][0], number) for number in order)
    yield from [Launch("gather", "broadcast")] * num_buffers
    yield Launch("reduce", "max")
    yield from (Launch("reduce", call, number) for number in order for call in calls[number][1:])
    yield from (Launch("reduce", call) for call in active.exchange.calls_behind_sums())
    for number in active.plan.gather_order:
        if not buckets[number].role.is_all_reduced:
            yield Launch("gather", "all_gather", number)
