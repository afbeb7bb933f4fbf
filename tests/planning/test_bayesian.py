"""The search over caps: deterministic, without a scale, and ends with what it measured."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from lightning_dear.planning import (
    BayesianFusion,
    BucketPlan,
    LinkCost,
    ModelTimes,
    TensorSpec,
    ThresholdFusion,
    plan,
)
from lightning_dear.planning.trials import BayesianSearch

WORLD_SIZE = 2
TENSORS = [TensorSpec(i, f"t{i}", 1 << 18, 4, "f", i, 199 - i) for i in range(200)]
TIMES = ModelTimes(0.1, 0.2, {}, {})


def _search(**options: int) -> BayesianSearch:
    search = BayesianFusion(**options).search(TENSORS, WORLD_SIZE, TIMES, LinkCost(1e-3, 1e-9))
    assert isinstance(search, BayesianSearch)
    return search


def _plans(least_mb: float, most_mb: float) -> dict[float, BucketPlan]:
    return ThresholdFusion().plans_of_caps(TENSORS, WORLD_SIZE, least_mb, most_mb)


def test_caps_with_more_buckets_than_possible_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [len(plan.buckets) for plan in _plans(1, 100).values()]
    monkeypatch.setattr(plan, "MAX_BUCKETS", counts[1])
    few = [len(plan.buckets) for plan in _plans(1, 100).values()]
    assert few == counts[1:]
    # The largest stays, and is refused where it is to be used.
    monkeypatch.setattr(plan, "MAX_BUCKETS", 0)
    assert len(_plans(1, 100)) == 1


def _run(search: BayesianSearch, step_s: Callable[[BucketPlan], float]) -> list[BucketPlan]:
    tried = []
    while (plan := search.next()) is not None:
        assert search.next() == plan
        tried.append(plan)
        search.tell(plan, step_s(plan))
    return tried


def _bowl(best_count: int, noise: float = 0.0) -> Callable[[BucketPlan], float]:
    """Seconds that rise with the distance, in octaves, from so many buckets."""

    def step_s(plan: BucketPlan) -> float:
        away = math.log2(len(plan.buckets) / best_count)
        return 0.2 * (1 + 0.04 * away**2 + noise * math.sin(997 * len(plan.buckets)))

    return step_s


def test_caps_are_even_on_a_logarithmic_scale_and_make_other_plans() -> None:
    plans = _plans(0.25, 256.0)
    assert min(plans) == 0.25
    assert len({plan.buckets for plan in plans.values()}) == len(plans) > 15
    steps = {round(4 * math.log2(cap_mb / 0.25), 6) for cap_mb in plans}
    assert all(step == round(step) for step in steps)


def test_the_best_measured_is_kept_within_few_trials() -> None:
    search = _search(num_trials=8)
    step_s = _bowl(12)
    tried = _run(search, step_s)
    assert len(tried) == 8
    assert len({plan.buckets for plan in tried}) == 8
    assert search.best == min(tried, key=step_s)
    assert "the best of 8 caps measured" in search.reason


@pytest.mark.parametrize("best_count", [3, 12, 60])
def test_it_comes_near_the_optimum(best_count: int) -> None:
    step_s = _bowl(best_count, noise=0.01)
    search = _search()
    tried = _run(search, step_s)
    best_s = min(map(step_s, _plans(0.25, 256.0).values()))
    assert step_s(search.best) <= 1.03 * best_s
    assert step_s(search.best) <= step_s(tried[0])


def test_suggestions_depend_neither_on_scale_nor_offset_nor_on_the_run() -> None:
    plain = _run(_search(), _bowl(12))
    assert _run(_search(), _bowl(12)) == plain
    assert _run(_search(), lambda plan: 1000 * _bowl(12)(plan)) == plain
    assert _run(_search(), lambda plan: 5 + _bowl(12)(plan)) == plain


def test_it_starts_with_the_caps_it_is_given() -> None:
    planner = BayesianFusion(bucket_cap_mb=3.0, first_bucket_cap_mb=2.0)
    start = ThresholdFusion(bucket_cap_mb=3.0, first_bucket_cap_mb=2.0).plan(TENSORS, WORLD_SIZE)
    search = planner.search(TENSORS, WORLD_SIZE, TIMES, LinkCost(1e-3, 1e-9))
    tried = _run(search, _bowl(60))
    assert planner.plan(TENSORS, WORLD_SIZE) == tried[0] == start
    assert all(len(plan.buckets[0].slices) <= 2 for plan in tried)
    assert any(len(plan.buckets[0].slices) == 2 for plan in tried[1:])


def test_a_flat_curve_is_no_problem() -> None:
    search = _search(num_trials=5)
    assert len(_run(search, lambda _: 0.5)) == 5


def test_it_ends_when_no_other_plan_is_left() -> None:
    tensors = [TensorSpec(0, "t", 1 << 17, 4, "f", 0, 0)]
    search = BayesianFusion().search(tensors, WORLD_SIZE, TIMES, LinkCost(1e-3, 1e-9))
    assert isinstance(search, BayesianSearch)
    tried = _run(search, lambda _: 1.0)
    assert 1 < len(tried) < 8
    assert all(not a.has_buckets_of(b) for a in tried for b in tried if a is not b)


def test_before_anything_is_measured_the_first_plan_is_the_best() -> None:
    search = _search()
    assert search.best == BayesianFusion().plan(TENSORS, WORLD_SIZE) == search.next()
    assert "nothing measured" in search.reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_trials": 1}, "num_trials must be >= 2"),
        ({"min_cap_mb": 0.0}, "above 0, and min_cap_mb below max_cap_mb"),
        ({"min_cap_mb": 8.0, "max_cap_mb": 8.0}, "above 0, and min_cap_mb below max_cap_mb"),
        ({"max_cap_mb": float("inf")}, "above 0, and min_cap_mb below max_cap_mb"),
        ({"bucket_cap_mb": 0.0}, "bucket_cap_mb must be > 0 MiB"),
    ],
)
def test_impossible_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BayesianFusion(**options)
