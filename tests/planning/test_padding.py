"""Padding: encoded and sent but not stepped, and the programme counts it as predictions do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dear.planning import (
    BucketPlan,
    CodecCost,
    CodecCosts,
    Linear,
    LinkCost,
    ModelTimes,
    TensorSpec,
    predict,
)
from lightning_dear.planning.fusion import fuse_groups
from lightning_dear.planning.measured import NO_CODEC
from lightning_dear.planning.predict import StepModel
from lightning_dear.planning.programme import (
    Grouping,
    Piece,
    best_groupings,
    courses_of,
    members_of,
)
from tests.planning.models import ITEMSIZE, codecs, links, unaligned_chains, world_sizes

Model = tuple[list[TensorSpec], ModelTimes]


def _plan_of(
    grouping: Grouping, pieces: Sequence[Piece], tensors: Sequence[TensorSpec], world_size: int
) -> BucketPlan:
    groups = members_of(pieces, grouping.cuts)
    plan = fuse_groups("", tensors, world_size, groups)
    # Forward reads last what is reduced first.
    left = [number for number, is_left in enumerate(grouping.uncompressed[::-1]) if is_left]
    return replace(plan, uncompressed=tuple(left))


@settings(max_examples=30)
@given(
    unaligned_chains(max_size=9),
    world_sizes,
    links,
    st.one_of(st.just(NO_CODEC), codecs),
    st.integers(1, 9),
)
def test_every_grouping_of_joined_neighbours_takes_what_is_predicted(
    model: Model, world_size: int, link: LinkCost, codecs: CodecCosts, most: int
) -> None:
    tensors, times = model[0], replace(model[1], step_s=3.0, late_step_s=2.0)
    [course] = courses_of(StepModel(tensors, world_size, times, link, codecs), most)
    found = best_groupings(course)
    for grouping in found[:8]:
        plan = _plan_of(grouping, course.pieces, tensors, world_size)
        predicted_s = predict(plan, tensors, times, link, codecs).step_s
        assert grouping.step_s == pytest.approx(predicted_s, rel=1e-9)
    # The bound of what is left of a step leaves the best one in.
    again = best_groupings(course, known_s=found[0].step_s)
    assert again[0].step_s == pytest.approx(found[0].step_s, rel=1e-9)


def test_padding_is_encoded_and_sent_and_not_stepped_by_hand() -> None:
    tensors = [
        TensorSpec(0, "bias", 3, ITEMSIZE, "f", first_use=0, ready=1),
        TensorSpec(1, "weight", 190, ITEMSIZE, "f", first_use=1, ready=0),
    ]
    times = ModelTimes(0.0, 0.0, {0: 0.0, 1: 0.0}, {0: 0.0, 1: 0.0}, step_s=193.0)
    # At four ranks both tensors fit into 256 elements, and so does each of them; sending, and
    # encoding, as many takes a second.
    link = LinkCost(alpha_s=0.0, beta_s=1 / (192 * ITEMSIZE))
    codecs = CodecCosts(CodecCost(encode=Linear(0.0, 1 / 256)))
    apart = fuse_groups("", tensors, 4, [[1], [0]])
    spans = predict(apart, tensors, times, link, codecs).spans
    assert [(span.lane, span.bucket, span.begin_s, span.end_s) for span in spans] == [
        ("reduce_scatter", 1, 1, 2),
        ("reduce_scatter", 0, 2, 3),
        # Steps of 3 and 190 seconds.
        ("all_gather", 0, 6, 7),
        ("all_gather", 1, 196, 197),
    ]
    together = fuse_groups("", tensors, 4, [[1, 0]])
    steps_s = [predict(plan, tensors, times, link, codecs).step_s for plan in (apart, together)]
    assert steps_s == [197, 1 + 1 + 193 + 1]
    [course] = courses_of(StepModel(tensors, 4, times, link, codecs), 2)
    assert [course.step_s([1, 2]), course.step_s([2])] == pytest.approx(steps_s)
    assert best_groupings(course)[0].cuts == (2,)


def test_a_bucket_that_is_full_costs_no_more_alone() -> None:
    tensors = [
        TensorSpec(index, str(index), numel, ITEMSIZE, "f", index, 2 - index)
        for index, numel in enumerate([1, 64, 64])
    ]
    times = ModelTimes(0.0, 0.0, dict.fromkeys(range(3), 0.0), dict.fromkeys(range(3), 0.0))
    link = LinkCost(alpha_s=0.0, beta_s=1 / (64 * ITEMSIZE))
    [course] = courses_of(StepModel(tensors, 2, times, link), 3)
    # 128 and 128 elements, one after the other, or 256 at once: a second for 128 in each half.
    assert course.step_s([2, 3]) == course.step_s([3]) == 4
    assert course.step_s([1, 2, 3]) == 6
