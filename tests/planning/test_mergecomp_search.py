"""MergeComp's plan against simpler ones: which there are, and what they say of a plan's step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_dear.planning import (
    BucketPlan,
    CodecCost,
    CodecCosts,
    Linear,
    LinkCost,
    MergeCompFusion,
    SingleFusion,
    predict,
)
from lightning_dear.planning.fusion import fuse_groups
from lightning_dear.planning.predicting import MergeCompSearch
from tests.planning.models import ITEMSIZE, UNIT, WORLD_SIZE, chain

TENSORS, _ = chain([1] * 4, [1.0] * 4, [1.0] * 4)
SINGLE = SingleFusion().plan(TENSORS, WORLD_SIZE)
PROGRAMME, HEURISTIC, START, UNMEASURED = (
    fuse_groups(name, TENSORS, WORLD_SIZE, groups)
    for name, groups in (
        ("mergecomp", [[0], [1, 2, 3]]),
        ("heuristic", [[0, 1], [2, 3]]),
        ("start", [[0, 1, 2], [3]]),
        ("unmeasured", [[0], [1], [2], [3]]),
    )
)


PREDICTED_S = {"mergecomp": 1.0, "heuristic": 1.1, "start": 1.3, "single": 2.0, "unmeasured": 0.9}


def _search(fitted_to: BucketPlan | None = None) -> MergeCompSearch:
    others = [HEURISTIC, SINGLE, UNMEASURED]
    search = MergeCompSearch(
        PROGRAMME,
        others,
        lambda plan: PREDICTED_S[plan.name],
        fitted_to,
    )
    search.tell(PROGRAMME, 1.01)
    search.tell(HEURISTIC, 1.3)
    search.tell(SINGLE, 1.9)
    return search


def test_a_step_is_expected_from_the_two_nearest_others_that_were_measured() -> None:
    assert _search().expected_s(PROGRAMME) == pytest.approx(1.0 + (0.2 - 0.1) / 2)
    assert _search().expected_s(SINGLE) == pytest.approx(2.0 + (0.2 + 0.01) / 2)


def test_what_the_costs_are_fitted_to_is_as_long_as_predicted() -> None:
    assert _search(START).expected_s(PROGRAMME) == pytest.approx(1.0 + (0.2 + 0.0) / 2)
    # Nearer than the programme's.
    assert _search(START).expected_s(SINGLE) == pytest.approx(2.0 + (0.2 + 0.0) / 2)


def test_a_plans_own_measurement_does_not_tell_what_it_is_expected_to_take() -> None:
    search = _search()
    before_s = search.expected_s(PROGRAMME)
    search.tell(PROGRAMME, 50.0)
    assert search.expected_s(PROGRAMME) == before_s


def test_without_measurements_a_step_is_expected_to_be_the_predicted_one() -> None:
    search = MergeCompSearch(PROGRAMME, [], lambda plan: PREDICTED_S[plan.name])
    assert search.expected_s(PROGRAMME) == 1.0


@pytest.mark.parametrize("twin", [PROGRAMME, HEURISTIC])
def test_a_start_with_the_buckets_of_a_measured_plan_tells_nothing_more(twin: BucketPlan) -> None:
    same = replace(twin, name="start")
    assert _search(same).expected_s(PROGRAMME) == _search().expected_s(PROGRAMME)


def test_the_starting_plan_counts_among_those_that_tell() -> None:
    tensors, times = chain([4] * 6, [1.0] * 6, [2.0] * 6)
    link = LinkCost(alpha_s=1.0, beta_s=2 / (UNIT * ITEMSIZE))
    costs = CodecCosts(CodecCost(encode=Linear(0.1), reduce_bytes=Linear(0, 1)))
    start = fuse_groups("start", tensors, WORLD_SIZE, [[0], [1, 2, 3], [4, 5]])
    told = set()
    for fitted_to in (None, start):
        fitted = replace(costs, fitted_to=fitted_to)
        search = MergeCompFusion().search(tensors, WORLD_SIZE, times, link, fitted)
        assert isinstance(search, MergeCompSearch)
        for plan in search.plans:
            search.tell(plan, predict(plan, tensors, times, link, costs).step_s + 1.0)
        told.add(search.expected_s(search.best))
        assert f"predicted {1e3 * search.expected_s(search.best):.3g} ms/step" in search.reason
    best_s = predict(search.best, tensors, times, link, costs).step_s
    assert sorted(told) == pytest.approx([best_s + 0.5, best_s + 1.0])


@pytest.mark.parametrize("may_mix", [False, True])
@pytest.mark.parametrize("allows_cuts", [False, True])
def test_what_needs_no_compressor_is_measured_where_it_is_allowed(
    may_mix: bool, allows_cuts: bool
) -> None:
    tensors, times = chain([1 << 17, 4], [1.0] * 2, [2.0] * 2)
    times = replace(times, allows_cuts=allows_cuts)
    costs = CodecCosts(CodecCost(encode=Linear(0.1), reduce_bytes=Linear(0, 1)), may_mix=may_mix)
    search = MergeCompFusion().search(tensors, WORLD_SIZE, times, LinkCost(1.0, 0.0), costs)
    assert isinstance(search, MergeCompSearch)
    found = [one for one in search.plans if one.name == "threshold_uncompressed"]
    assert bool(found) is may_mix
    for plan in found:
        assert plan.uncompressed == tuple(range(len(plan.buckets)))
        # A tensor of 64 MiB, and buckets of at most 25.
        pieces = [one for bucket in plan.buckets for one in bucket.slices if one.tensor == 0]
        assert (len(pieces) > 1) is allows_cuts
