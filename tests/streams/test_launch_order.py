"""What a step launches on the simulated device is what the docstring of `nccl.py` says."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from lightning_dear.bucket import Bucket
from lightning_dear.collectives.work import Work
from lightning_dear.engine.active_plan import ActivePlan
from lightning_dear.engine.step import OptimizerPipeline
from lightning_dear.exchange.coded_bucket import CodedBucket, HostsReduction
from lightning_dear.exchange.low_rank import LowRankBucket
from lightning_dear.exchange.sparse.bucket import SparseBucket
from lightning_dear.exchange.sparse.owned_bucket import StaticBucket
from lightning_dear.planning.plan import MAX_BUCKETS
from tests.streams.ranks import Rank, on_simulated_cuda
from tests.streams.test_trainings import CODED, HOSTS, VARIANTS, coded
from tests.streams.trainings import NUM_STEPS, OnDevice, Training

GROUP_OF = {
    "reduce_scatter": "reduce",
    "all_to_all": "reduce",
    "all_reduce": "reduce",
    "sums_of_host": "reduce",
    "max": "reduce",
    "all_gather": "gather",
    "broadcast": "gather",
}
OP_OF = {
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "all_reduce": "sum",
    "max": "maximum",
    "all_gather": "all-gather",
    "broadcast": "broadcast",
}
"""Call -> what the simulated NCCL calls it, in one hop."""

BUCKETS_OF_ONE = {"reduce_scatter", "all_to_all", "sums_of_host", "all_gather"}


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


def reduce_calls(exchange: Any, bucket: Bucket) -> list[str]:
    """Names of the collectives that reduce the bucket, in the order of their launches."""
    coded = exchange.coded[bucket.number] if exchange.coded else None
    if isinstance(coded, SparseBucket):
        if coded.is_sparse:
            return ["all_to_all" if coded.sparse.is_static else "messages"]
        return ["reduce_scatter" if coded.sparse.is_scattered else "all_reduce"]
    if isinstance(coded, LowRankBucket):
        # A bucket without a matrix has no second message.
        return ["all_reduce"] * (1 + bool(coded.messages.second.numel()))
    if isinstance(coded, CodedBucket):
        if isinstance(coded.reduction, HostsReduction):
            return ["sums_of_host"]
        return ["reduce_scatter" if coded.compressor.is_summable else "all_to_all"]
    return ["all_reduce" if bucket.role.is_all_reduced else "reduce_scatter"]


def calls_behind_sums(exchange: Any) -> list[str]:
    """Names of the collectives that the last `note_used` has launched, for all buckets together."""
    static = [one for one in exchange.coded if isinstance(one, StaticBucket)]
    return ["all_reduce"] * any(one.is_sparse and one.are_regions_due for one in static)


def launches_of_step(active: ActivePlan, *, sends_buffers: bool) -> Iterator[Launch]:
    """Yields one optimizer's launches in one step with one round, without those of user's calls.

    Args:
        active: The present plan, after the step.
        sends_buffers: Whether module buffers are sent. They are not if there are none, or if an
            earlier step, such as of another optimizer, has sent them since the last forward.
    """
    buckets, order = active.flat.buckets, active.plan.reduce_order
    calls = {number: reduce_calls(active.exchange, buckets[number]) for number in order}
    yield from (Launch("reduce", calls[number][0], number) for number in order)
    yield from [Launch("gather", "broadcast")] * sends_buffers
    yield Launch("reduce", "max")
    yield from (Launch("reduce", call, number) for number in order for call in calls[number][1:])
    yield from (Launch("reduce", call) for call in calls_behind_sums(active.exchange))
    for number in active.plan.gather_order:
        if not buckets[number].role.is_all_reduced:
            yield Launch("gather", "all_gather", number)


@contextmanager
def noted(trained: OnDevice) -> Iterator[list[tuple[str, int]]]:
    """(call, its last argument where that is a number) of all that is launched meanwhile."""
    collectives: Any = trained.pipeline.collectives
    found: list[tuple[str, int]] = []

    def noting(call: str, launch: Any) -> Any:
        def launched(*given: Any) -> Work:
            found.append((call, given[-1] if isinstance(given[-1], int) else -1))
            return launch(*given)

        return launched

    names = {call: f"launch_{call}" for call in GROUP_OF}
    for call, name in names.items():
        setattr(collectives, name, noting(call, getattr(collectives, name)))
    yield found
    for name in names.values():
        delattr(collectives, name)


def expected_of(
    part: OptimizerPipeline, training: Training, *, sends_buffers: bool
) -> list[Launch]:
    """One optimizer's launches, with those that the training's own calls bring."""
    assert part.plans.active is not None
    order = [*launches_of_step(part.plans.active, sends_buffers=sends_buffers)]
    gathers = [one for one in order if one.group == "gather" and one.bucket is not None]
    sums = order[: len(order) - len(gathers)]
    if training.weighs and part.plans.number == 0:
        sums = [Launch("reduce", "all_reduce"), *sums]
    scale = [Launch("reduce", "max")] * training.is_scaled
    norm = [Launch("gather", "all_gather")] * (training.max_norm is not None)
    apart = [Launch("reduce", "max"), Launch("reduce", "all_reduce")]
    shown = [Launch("gather", "all_gather")] * len(part.plans.active.flat.buckets)
    taken = [Launch("reduce", "max")]
    others = apart * bool(training.optimizer == "apart") + [*shown, *taken] * training.is_hooked
    return [*sums, *others, *scale, *norm, *gathers]


def as_launch(call: str, number: int, part: OptimizerPipeline) -> Launch:
    first = part.plans.number * MAX_BUCKETS
    assert part.plan is not None
    is_of_bucket = call in {*BUCKETS_OF_ONE, "all_reduce"}
    is_own = is_of_bucket and first <= number < first + len(part.plan.buckets)
    return Launch(GROUP_OF[call], call, number - first if is_own else None)


def check_steps(rank: Rank, training: Training) -> list[Launch]:
    """Trains, comparing each step from the second on with what is expected; the last one's."""
    trained = OnDevice(training, rank)
    pipeline, device = trained.pipeline, rank.device
    for step in range(NUM_STEPS):
        if step == 2:
            trained.between()
        with noted(trained) as found:
            begin = len(device.launches)
            trained.step(step)
            launched = device.launches[begin:]
        if not step:
            # Recorded: it exchanges objects, too.
            continue
        has_buffers = bool(pipeline.training.tree.buffers())
        if has_buffers and step == 1 and found[0][0] == "max":
            # Before the second forward ranks tell each other whether they have written buffers. If
            # gradients accumulate, that is in the recorded step.
            found, launched = found[1:], launched[1:]
        expected: list[Launch] = []
        seen: list[Launch] = []
        for number, part in enumerate(pipeline.parts):
            own = expected_of(part, training, sends_buffers=has_buffers and not number)
            own_found = found[len(expected) : len(expected) + len(own)]
            expected += own
            seen += [as_launch(call, at, part) for call, at in own_found]
        assert len(found) == len(expected)
        assert seen == expected
        if pipeline.collectives.hops == 1:
            ops = [f"{OP_OF[one.call]} in '{one.group}'" for one in expected]
            told = [f"{one.split(' of ')[0]} in {one.rsplit(' in ')[-1]}" for one in launched]
            assert told == ops
    trained.end()
    return expected


def launches(training: Training, size: int, ranks_a_host: int = 1) -> list[Launch]:
    """Those of the last step, the same on all ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = on_simulated_cuda(
            lambda rank: check_steps(rank, training),
            size,
            is_checked=False,
            ranks_a_host=ranks_a_host,
        )
    first, *others = found.results
    assert all(other == first for other in others)
    assert found.other_order is None, found.other_order
    return first


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model", ["conv", "mlp"])
def test_a_step_launches_in_the_order_that_is_written(variant: str, model: str) -> None:
    order = launches(replace(VARIANTS[variant], model=model), 3)
    count = Counter(one.call for one in order)
    assert count["broadcast"] == (model == "conv")
    num_more = VARIANTS[variant].is_scaled + (variant in ("apart", "hooked"))
    assert count["max"] == len(VARIANTS[variant].build()[1]) + num_more


@pytest.mark.parametrize("name", CODED)
def test_a_step_that_encodes_launches_in_that_order(name: str) -> None:
    launches(coded(name, "conv"), 2)


@pytest.mark.parametrize(("size", "ranks_a_host"), HOSTS)
@pytest.mark.parametrize("what", [*VARIANTS, *CODED])
def test_in_two_hops_a_step_launches_in_that_order(what: str, size: int, ranks_a_host: int) -> None:
    training = VARIANTS[what] if what in VARIANTS else coded(what, "mlp")
    launches(training, size, ranks_a_host)
