"""`auto` measures what is promising, within its budget, and is never worse than the fixed plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dear.planning import (
    AutoFusion,
    BucketPlan,
    LinkCost,
    MergeCompFusion,
    ModelTimes,
    ThresholdFusion,
    predict,
)
from lightning_dear.planning.predict import StepModel
from lightning_dear.planning.search import STEPS_BEFORE_SEARCH, STEPS_PER_TRIAL
from lightning_dear.planning.trials import AutoSearch, _gains_lost
from tests.planning.models import ITEMSIZE, UNIT, WORLD_SIZE, chain

# 64 MiB in 32 layers; a step computes for 0.3 s.
TENSORS, TIMES = chain([(1 << 19) // UNIT] * 32, [0.1 / 32] * 32, [0.2 / 32] * 32)
NBYTES = sum(one.numel for one in TENSORS) * ITEMSIZE
LINKS = [LinkCost(alpha_s, ratio * 0.3 / NBYTES) for alpha_s in (1e-4, 4e-3) for ratio in (0.5, 2)]


def _search(link: LinkCost = LINKS[1], times: ModelTimes = TIMES, **options: float) -> AutoSearch:
    search = AutoFusion(**options).search(TENSORS, WORLD_SIZE, times, link)
    assert isinstance(search, AutoSearch)
    return search


def _tried(search: AutoSearch, seconds: list[float]) -> list[tuple[BucketPlan, float]]:
    tried = []
    while (plan := search.next()) is not None:
        tried.append((plan, seconds[len(tried) % len(seconds)]))
        search.tell(*tried[-1])
    return tried


FIXED = ThresholdFusion().plan(TENSORS, WORLD_SIZE)


@settings(max_examples=50)
@given(st.lists(st.sampled_from([0.9, 0.99, 1.0, 1.01, 1.2]), min_size=8, max_size=8))
def test_what_is_kept_never_measured_worse_than_the_fixed_plan(seconds: list[float]) -> None:
    search = AutoSearch(FIXED, CANDIDATES, lambda _: 1.0)
    tried = _tried(search, seconds)

    def mean_s(plan: BucketPlan) -> float:
        times_s = [step_s for other, step_s in tried if other == plan]
        return sum(times_s) / len(times_s)

    assert mean_s(search.best) <= mean_s(FIXED)
    if search.best != FIXED:
        assert mean_s(search.best) < mean_s(FIXED)
        assert sum(plan == search.best for plan, _ in tried) == 2
    assert sum(plan == FIXED for plan, _ in tried) == 2
    assert len(tried) == len(CANDIDATES) + 4


CANDIDATES = [plan for plan in _search().plans if plan != FIXED]


@pytest.mark.parametrize("num_steps", [32, 39, 46, 60, 100])
@pytest.mark.parametrize("link", LINKS)
def test_it_keeps_to_its_budget(num_steps: int, link: LinkCost) -> None:
    tried = _tried(_search(link, num_steps=num_steps), [1.0])
    assert STEPS_BEFORE_SEARCH + STEPS_PER_TRIAL * len(tried) <= num_steps
    assert len(tried) >= 4


@pytest.mark.parametrize("link", LINKS)
def test_if_predictions_come_true_it_finds_the_best_of_a_grid(link: LinkCost) -> None:
    def step_s(plan: BucketPlan) -> float:
        return predict(plan, TENSORS, TIMES, link).step_s

    search = _search(link)
    while (plan := search.next()) is not None:
        search.tell(plan, step_s(plan))
    grid = ThresholdFusion().plans_of_caps(TENSORS, WORLD_SIZE, 0.25, 256.0).values()
    assert step_s(search.best) <= 1.03 * min(map(step_s, [*grid, FIXED]))


def test_the_fixed_plan_and_the_programmes_are_among_the_distinct_candidates() -> None:
    plans = _search().plans
    assert plans[0] == FIXED
    assert plans[1] == MergeCompFusion().best_plan(StepModel(TENSORS, WORLD_SIZE, TIMES, LINKS[1]))
    distinct = {(plan.buckets, plan.all_reduced) for plan in plans}
    assert len(distinct) == len(plans) == 5


def test_of_equally_good_plans_those_with_fewer_messages_are_tried() -> None:
    # Compute hides whatever the link does.
    slow = replace(TIMES, forward_s=100.0, backward_s=200.0)
    fixed, programme, *others = _search(LinkCost(1e-5, 1e-10), slow).plans
    assert len(programme.buckets) <= len(fixed.buckets)
    # The one nearest the input, and the rest.
    assert len(others[0].buckets) == 2


def test_one_lucky_measurement_does_not_decide() -> None:
    search = _search()
    lucky = search.plans[2]
    count = 0
    while (plan := search.next()) is not None:
        count += 1
        search.tell(plan, 0.5 if plan == lucky and count <= 5 else 2.0 if plan == lucky else 1.0)
    assert search.best == FIXED


def test_reasons_in_one_line() -> None:
    search = _search()
    assert "nothing measured" in search.reason
    fast = search.plans[1]
    while (plan := search.next()) is not None:
        search.tell(plan, 0.212 if plan == fast else 0.230)
    assert search.reason.endswith("212 ms/step against 230 ms of threshold(8 MiB, first 1 MiB)")
    assert f"{len(fast.buckets)} buckets of" in search.reason
    search = _search()
    _tried(search, [0.1])
    assert "stay: 100 ms/step, none of 4 others was faster" in search.reason
    assert "\n" not in search.reason


# Each half takes longer than forward and less than backward.
BETWEEN = LinkCost(1e-4, 0.3 / NBYTES)


def test_what_should_be_faster_all_reduced_is_measured_beside_the_same_without() -> None:
    for share in (0.1, 0.3):
        search = _search(BETWEEN, all_reduced_share=share)
        (reducing,) = (plan for plan in search.plans if plan.all_reduced)
        assert any(
            replace(without, all_reduced=reducing.all_reduced) == reducing
            for without in search.plans
            if without != reducing
        )
        numel = sum(reducing.buckets[number].numel for number in reducing.all_reduced)
        assert 0 < numel <= share * sum(one.numel for one in TENSORS)
        while (plan := search.next()) is not None:
            search.tell(plan, predict(plan, TENSORS, TIMES, BETWEEN).step_s)
        assert search.best == reducing
        count = len(reducing.all_reduced)
        assert f"{count} of them all-reduced" in search.reason
        assert search.reason.endswith("ms of threshold(8 MiB, first 1 MiB)")
        assert "\n" not in search.reason


def test_everything_all_reduced_is_measured_where_that_is_allowed_and_not_hopeless() -> None:
    refusing = replace(TIMES, allows_all_reduce=False)
    hidden, exposed = LINKS[0], LinkCost(1e-4, 0.36 / NBYTES)
    for share, times, link in (
        (0.9, TIMES, hidden),
        (1, refusing, hidden),
        (0, TIMES, hidden),
        (1, TIMES, exposed),
    ):
        plans = _search(link, times, all_reduced_share=share).plans
        assert not any(len(plan.all_reduced) == len(plan.buckets) for plan in plans)
    search = _search(hidden, all_reduced_share=1)
    (everything,) = (one for one in search.plans if "DDP" in one.name)
    while (plan := search.next()) is not None:
        search.tell(plan, 0.212 if plan == everything else 0.230)
    assert search.best == everything
    assert "all all-reduced, 212 ms/step against 230 ms of threshold" in search.reason


def test_a_share_is_between_nothing_and_everything() -> None:
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"all_reduced_share=.* Set 0 to 1"):
            AutoFusion(all_reduced_share=share)


def test_a_model_with_one_possible_plan_is_measured_once() -> None:
    tensors, times = chain([1], [1], [1])
    search = AutoFusion().search(tensors, WORLD_SIZE, times, LINKS[0])
    assert isinstance(search, AutoSearch)
    assert len(_tried(search, [1.0])) == 1


def test_where_nothing_takes_time_any_plan_will_do() -> None:
    tensors, times = chain([1] * 4, [0.0] * 4, [0.0] * 4)
    search = AutoFusion().search(tensors, WORLD_SIZE, times, LinkCost(0.0, 0.0))
    assert search.next() is not None
    assert _gains_lost(0.0, 0.0) == 0
    assert _gains_lost(1.0, 0.0) > _gains_lost(2.0, 1.0) > _gains_lost(1.0, 1.0)


def test_too_small_a_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="num_steps must be >= 32"):
        AutoFusion(num_steps=31)
