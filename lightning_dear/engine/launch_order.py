"""The order in which a step launches its collectives, written once.

Where messages are matched by their order (NCCL), all ranks must launch in one order over all
groups. `launches_of_step` is that order, and what the step launches is compared with it on a
simulated device (tests/streams/test_launch_order.py):

    launched                                        group    in which order, and when
    ----------------------------------------------  -------  -------------------------------------
    gradients of each bucket                        reduce   reduce order; in backward, once full,
                                                             the rest of them before the step
    module buffers, a message for each dtype        gather   behind all gradients, once a forward
    flags: used, late, notes, inf                   reduce   behind that
    second factors of each bucket (PowerSGD)        reduce   reduce order; behind the flags
    new regions, if they are due (static Ok-Topk)   reduce   behind the sums
    parameters, or means, of each bucket            gather   gather order; while the step goes on

Whoever asks for it launches between the sums and the gathers: a norm (gather), a loss scale
(reduce), whole gradients (a gather of each bucket, and flags when they are taken back).

With several optimizers each has all of this before the next one begins. Late gradients have a round
of their own: all but the gathers once more. They are refused where the host cannot read flags.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lightning_dear.engine.active_plan import ActivePlan


class Launch(NamedTuple):
    """One call of a method of `Collectives`.

    Attributes:
        group: "reduce" or "gather": in which process group.
        call: What follows "launch_" in the method's name.
        bucket: Number of the bucket in its plan. None means that the message is of no bucket.
    """

    group: str
    call: str
    bucket: int | None = None


def launches_of_step(active: ActivePlan, num_buffers: int) -> Iterator[Launch]:
    """One optimizer's launches in one step, without those that the user's calls bring.

    Args:
        active: The plan at work, after the step.
        num_buffers: How many messages the module's buffers take. 0 if they have been sent since the
            last forward.
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
