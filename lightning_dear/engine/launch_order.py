"""The order in which one optimizer's step launches its collectives, for readers and for a test.

NCCL matches messages by their order, so all ranks must launch in one order over all process groups.
`launches_of_step` yields that order. A test compares it with what a step launches on a simulated
device (tests/streams/test_launch_order.py):

    launched                                        group    in which order, and when
    ----------------------------------------------  -------  -------------------------------------
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


def launches_of_step(active: ActivePlan, *, sends_buffers: bool) -> Iterator[Launch]:
    """Yields one optimizer's launches in one step with one round, without those of user's calls.

    Args:
        active: The present plan, after the step.
        sends_buffers: Whether module buffers are sent. They are not if there are none, or if an
            earlier step, such as of another optimizer, has sent them since the last forward.
    """
    buckets, order = active.flat.buckets, active.plan.reduce_order
    calls = {number: active.exchange.reduce_calls(buckets[number]) for number in order}
    yield from (Launch("reduce", calls[number][0], number) for number in order)
    yield from [Launch("gather", "broadcast")] * sends_buffers
    yield Launch("reduce", "max")
    yield from (Launch("reduce", call, number) for number in order for call in calls[number][1:])
    yield from (Launch("reduce", call) for call in active.exchange.calls_behind_sums())
    for number in active.plan.gather_order:
        if not buckets[number].role.is_all_reduced:
            yield Launch("gather", "all_gather", number)
