"""MergeComp's search finds the best cut, and never more than the exact programme."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from lightning_dear.planning import (
    CodecCost,
    CodecCosts,
    Linear,
    LinkCost,
    MergeCompFusion,
    MergeCompHeuristicFusion,
    ModelTimes,
    TensorSpec,
    predict,
)
from lightning_dear.planning.fusion import fuse_groups
from lightning_dear.planning.predict import StepModel
from lightning_dear.planning.predicting import best_cuts
from lightning_dear.planning.programme import Course, courses_of
from lightning_dear.planning.search import described
from tests.planning.models import (
    ITEMSIZE,
    UNIT,
    WORLD_SIZE,
    chain,
    codecs,
    links,
    unaligned_chains,
    world_sizes,
)

Model = tuple[list[TensorSpec], ModelTimes]

MODEL = chain([2] * 12, forward_s=[1.0] * 12, backward_s=[2.0] * 12)
LINK = LinkCost(alpha_s=0.1, beta_s=2 / (UNIT * ITEMSIZE))
INT8 = CodecCosts(
    CodecCost(
        Linear(0.2, 0.1 / UNIT), reduce_bytes=Linear(0.0, 1.0), gather_bytes=Linear(0.0, 1.0)
    ),
    CodecCost(encode=Linear(0.1)),
    may_mix=True,
)


def _course(
    model: Model, link: LinkCost, codecs: CodecCosts, world_size: int = WORLD_SIZE
) -> Course:
    tensors, times = model
    [course] = courses_of(StepModel(tensors, world_size, times, link, codecs), len(tensors))
    return course


@settings(max_examples=40)
@given(unaligned_chains(max_size=8), world_sizes, links, codecs)
def test_the_course_of_a_step_is_the_prediction(
    model: Model, world_size: int, link: LinkCost, codecs: CodecCosts
) -> None:
    tensors, times = model
    times = replace(times, step_s=3.0, late_step_s=2.0)
    size = len(tensors)
    order = [one.index for one in sorted(tensors, key=lambda one: one.ready)]
    cuts = sorted({max(size // 3, 1), max(size // 2, 1), size})
    groups = [order[begin:end] for begin, end in zip([0, *cuts], cuts, strict=False)]
    plan = fuse_groups("", tensors, world_size, groups)
    expected_s = predict(plan, tensors, times, link, codecs).step_s
    found_s = _course((tensors, times), link, codecs, world_size).step_s(cuts)
    assert found_s == pytest.approx(expected_s, rel=1e-9)


def test_two_groups_are_cut_at_the_best_place() -> None:
    course = _course(MODEL, LINK, INT8)
    steps_s = [course.step_s([cut, 12]) for cut in range(1, 12)]
    assert best_cuts(course, max_groups=2, min_gain=0) == [1 + steps_s.index(min(steps_s)), 12]
    assert min(steps_s) < course.step_s([12])


def test_a_third_group_must_gain_enough() -> None:
    course = _course(MODEL, LINK, INT8)
    steps_s = [course.step_s(best_cuts(course, most, 0.0)) for most in (2, 3)]
    gain = 1 - steps_s[1] / steps_s[0]
    assert gain > 0
    assert len(best_cuts(course, 3, 0.9 * gain)) == 3
    assert len(best_cuts(course, 3, 1.1 * gain)) == 2
    assert best_cuts(course, 3, 1.0) == [12]


def test_more_groups_than_tensors_are_not_made() -> None:
    model = chain([1], [1.0], [1.0])
    assert best_cuts(_course(model, LINK, INT8), max_groups=4) == [1]
    model = chain([1, 1], [9.0] * 2, [9.0] * 2)
    assert len(best_cuts(_course(model, LINK, INT8), max_groups=4, min_gain=0)) <= 2


def test_the_plan_is_all_compressed_and_not_better_than_the_programmes() -> None:
    tensors, times = MODEL
    planner = MergeCompHeuristicFusion(max_groups=3, min_gain=0.0)
    search = planner.search(tensors, WORLD_SIZE, times, LINK, INT8)
    assert search.next() is None
    assert search.best.uncompressed == ()
    assert 1 < len(search.best.buckets) <= 3
    assert search.reason.startswith("mergecomp_heuristic: ")
    best = MergeCompFusion().search(tensors, WORLD_SIZE, times, LINK, INT8)
    best_s, found_s = (
        predict(one.best, tensors, times, LINK, INT8).step_s for one in (best, search)
    )
    assert best_s < found_s
    assert f"predicted {1e3 * best_s:.3g} ms/step" in best.reason


def test_people_are_told_how_many_buckets_are_uncompressed() -> None:
    tensors, times = MODEL
    plan = MergeCompHeuristicFusion(min_gain=0).best_plan(
        StepModel(tensors, WORLD_SIZE, times, LINK, INT8)
    )
    assert "uncompressed" not in described(plan)
    assert described(replace(plan, uncompressed=(0,))).endswith(", 1 of them uncompressed")
    everything = replace(plan, uncompressed=tuple(range(len(plan.buckets))))
    assert described(everything).endswith(", all uncompressed")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_groups": 1}, "max_groups must be >= 2, got 1"),
        ({"min_gain": -0.1}, "min_gain must be 0..1"),
        ({"min_gain": float("nan")}, "min_gain must be 0..1"),
        ({"max_pieces": 0}, "max_pieces must be >= 1"),
    ],
)
def test_impossible_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MergeCompHeuristicFusion(**options)
