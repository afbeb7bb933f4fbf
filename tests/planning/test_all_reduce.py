"""All-reduced buckets in predictions, and which ones are chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dear.planning import BucketPlan, LinkCost, NoFusion, TensorSpec, predict
from lightning_dear.planning.measured import ModelTimes, combined_times
from lightning_dear.planning.plan import Specs, check_plan
from lightning_dear.planning.predict import StepModel
from lightning_dear.planning.refine import choose_all_reduce, everything_all_reduced
from lightning_dear.planning.search import described
from tests.planning.models import ITEMSIZE, UNIT, WORLD_SIZE, bounds_s, chain, links
from tests.planning.test_predict import LINK, planned

# Backward leaves the link idle, forward has no time for the gathers.
TENSORS, TIMES = chain([4, 1, 1, 1], forward_s=[1, 1, 1, 1], backward_s=[9, 9, 9, 1])
PLAN = NoFusion().plan(TENSORS, WORLD_SIZE)


def _chosen(
    plan: BucketPlan, tensors: Specs, times: ModelTimes, link: LinkCost, share: float
) -> BucketPlan:
    return choose_all_reduce(plan, StepModel(tensors, plan.world_size, times, link), share)


def test_a_step_by_hand() -> None:
    tensors, times = chain([2, 3, 1], forward_s=[1, 4, 2], backward_s=[2, 4, 2])
    plan = replace(NoFusion().plan(tensors, WORLD_SIZE), all_reduced=(1,))
    assert plan.gather_order == (0, 2)
    predicted = predict(plan, tensors, replace(times, step_s=6), LINK)
    spans = [(span.lane, span.bucket, span.begin_s, span.end_s) for span in predicted.spans]
    assert spans == [
        ("reduce_scatter", 2, 2, 4),
        ("all_reduce", 1, 6, 14),
        ("reduce_scatter", 0, 14, 17),
        # Of the step 2 and 1 seconds, each followed by a gather, and 2 x 3 for the whole bucket.
        ("all_gather", 0, 19, 22),
        ("all_gather", 2, 22, 24),
    ]
    assert predicted.step_s == 17 + 9 + 7


def test_an_all_reduce_costs_what_was_measured_of_it() -> None:
    measured = replace(LINK, all_reduce=LinkCost(0.5, LINK.beta_s / 2))
    assert LINK.all_reduce_s(UNIT * ITEMSIZE, 2) == 2 + 2
    assert measured.all_reduce_s(UNIT * ITEMSIZE, 2) == 0.5 + 1
    assert measured.all_reduce_s(UNIT * ITEMSIZE, 1) == 0
    assert measured.reduce_scatter_s(UNIT * ITEMSIZE, 2) == 2
    plan = replace(PLAN, all_reduced=(0, 1, 2, 3))
    span = predict(plan, TENSORS, TIMES, measured).spans[0]
    assert span.end_s - span.begin_s == 1.5
    narrow = [replace(one, itemsize=2) for one in TENSORS]
    span = predict(plan, narrow, TIMES, measured).spans[0]
    # Half the bytes, but gradients of 16 bits are all-reduced in fp32.
    assert span.end_s - span.begin_s == 1.5


def test_gathers_move_to_where_backward_leaves_the_link_idle() -> None:
    found = _chosen(PLAN, TENSORS, TIMES, LINK, 3 / 7)
    # Gathers end 5, 7, 9 and 11 s after the step, and are due after 0, 1, 2 and 3; without two of
    # them the last one is in time but for what forward waits for the first.
    assert found.all_reduced == (1, 2)
    assert replace(found, all_reduced=()) == PLAN
    before, after = (predict(one, TENSORS, TIMES, LINK) for one in (PLAN, found))
    assert after.step_s == before.step_s - 8 + 5


def test_the_share_is_kept_to() -> None:
    for share, most in ((0, 0), (0.1, 0), (1 / 7, 1), (2 / 7, 2), (6 / 7, 3), (1, 4)):
        found = _chosen(PLAN, TENSORS, TIMES, LINK, share)
        assert len(found.all_reduced) <= most, share
        assert bool(found.all_reduced) == bool(most), share


def test_where_it_gains_nothing_or_is_not_allowed_nothing_is_all_reduced() -> None:
    slow = replace(TIMES, step_s=1e3)
    assert _chosen(PLAN, TENSORS, slow, LINK, 1).all_reduced == ()
    forbidden = replace(TIMES, allows_all_reduce=False)
    assert _chosen(PLAN, TENSORS, forbidden, LINK, 1).all_reduced == ()
    assert not combined_times([TIMES, forbidden], max).allows_all_reduce
    alone = replace(PLAN, world_size=1)
    assert _chosen(alone, TENSORS, TIMES, LINK, 1).all_reduced == ()


def test_a_cheap_start_makes_small_buckets_all_reduced() -> None:
    cheap = replace(LINK, all_reduce=LinkCost(0.0, LINK.beta_s))
    tensors, times = chain([1, 9, 1], forward_s=[0, 30, 30], backward_s=[1, 1, 1])
    plan = NoFusion().plan(tensors, WORLD_SIZE)
    # The first bucket's exchanges are both waited for.
    assert _chosen(plan, tensors, times, cheap, 0.1).all_reduced == (0,)


def test_all_buckets_are_all_reduced_where_that_starts_without_delay() -> None:
    cheap = replace(LINK, alpha_s=50, all_reduce=LinkCost(0.0, LINK.beta_s))
    found = _chosen(PLAN, TENSORS, TIMES, cheap, 1)
    assert found.all_reduced == (0, 1, 2, 3)


@settings(max_examples=60)
@given(planned(), links, st.sampled_from([0.1, 0.5, 1.0]), st.booleans())
def test_what_is_chosen_is_a_plan_and_never_predicted_to_be_slower(
    planned: tuple, link: LinkCost, share: float, is_cheap: bool
) -> None:
    plan, tensors, times = planned
    if is_cheap:
        link = replace(link, all_reduce=LinkCost(link.alpha_s, link.beta_s / 2))
    found = _chosen(plan, tensors, times, link, share)
    check_plan(found, tensors)
    predicted = predict(found, tensors, times, link)
    assert predicted.step_s <= predict(plan, tensors, times, link).step_s
    numel = sum(found.buckets[number].numel for number in found.all_reduced)
    assert numel <= share * sum(bucket.numel for bucket in plan.buckets)
    if not is_cheap:
        assert predicted.step_s >= bounds_s(found, times, link)[0] - 1e-9
    gathered = [span.bucket for span in predicted.spans if span.lane == "all_gather"]
    assert sorted([*gathered, *found.all_reduced]) == list(range(len(plan.buckets)))


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 9 << 18), min_size=1, max_size=20),
    st.randoms(),
    st.sampled_from([1, 4]),
)
def test_everything_all_reduced_has_the_buckets_of_ddp(
    sizes: list[int], random: object, divisor: int
) -> None:
    order = list(range(len(sizes)))
    random.shuffle(order)  # type: ignore[attr-defined]
    tensors = [
        TensorSpec(i, str(i), size, 4, "f", i, order.index(i)) for i, size in enumerate(sizes)
    ]
    plan = everything_all_reduced(tensors, WORLD_SIZE, divisor)
    check_plan(plan, tensors)
    assert plan.all_reduced == tuple(range(len(plan.buckets)))
    assert plan.gather_order == ()
    like = [torch.empty(1).expand(sizes[index]) for index in order]
    groups, _ = dist._compute_bucket_assignment_by_size(
        like, [(1 << 20) // divisor, (25 << 20) // divisor]
    )
    theirs = {frozenset(order[place] for place in group) for group in groups}
    assert {frozenset(one.tensor for one in bucket.slices) for bucket in plan.buckets} == theirs


def test_descriptions() -> None:
    some, every = (replace(PLAN, all_reduced=numbers) for numbers in ((1, 2), (0, 1, 2, 3)))
    assert described(some).endswith("MiB, 2 of them all-reduced")
    assert described(every).endswith("MiB, all all-reduced")
    assert "all-reduced" not in described(PLAN)


@pytest.mark.parametrize("numbers", [(9,), (1, 1), (2, 1), (-1,)])
def test_numbers_that_name_no_bucket_are_refused(numbers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="once and in order"):
        check_plan(replace(PLAN, all_reduced=numbers), TENSORS)
