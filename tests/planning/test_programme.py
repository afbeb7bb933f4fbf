"""The dynamic programme is exact: against every grouping there is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dear.planning import (
    BucketPlan,
    CodecCosts,
    LinkCost,
    MergeCompFusion,
    MergeCompHeuristicFusion,
    ModelTimes,
    NoFusion,
    SingleFusion,
    TensorSpec,
    ThresholdFusion,
    predict,
    predicting,
)
from lightning_dear.planning import programme as programme_module
from lightning_dear.planning.fusion import fuse_groups
from lightning_dear.planning.measured import NO_CODEC, CodecCost, Linear
from lightning_dear.planning.predict import StepModel
from lightning_dear.planning.programme import Course, best_groupings, courses_of, pre_merged
from tests.planning.models import (
    ITEMSIZE,
    UNIT,
    WORLD_SIZE,
    chain,
    chains,
    codecs,
    links,
    unaligned_chains,
    world_sizes,
)

Model = tuple[list[TensorSpec], ModelTimes]


def _groupings(count: int) -> Iterator[list[list[int]]]:
    """Every way to cut 0 ... count-1 into neighbours."""
    for cuts in itertools.product([False, True], repeat=count - 1):
        edges = [0, *(place + 1 for place, is_cut in enumerate(cuts) if is_cut), count]
        yield [list(range(*span)) for span in itertools.pairwise(edges)]


def _plans(tensors: list[TensorSpec], world_size: int, may_mix: bool) -> Iterator[BucketPlan]:
    """Every plan of neighbours, and every choice of what to leave uncompressed."""
    order = [one.index for one in sorted(tensors, key=lambda one: one.ready)]
    for groups in _groupings(len(order)):
        members = [[order[place] for place in group] for group in groups]
        plan = fuse_groups("", tensors, world_size, members)
        for left in itertools.product([False, True] if may_mix else [False], repeat=len(groups)):
            yield replace(plan, uncompressed=tuple(n for n, is_left in enumerate(left) if is_left))


def _course(
    model: Model, link: LinkCost, codecs: CodecCosts = NO_CODEC, world_size: int = WORLD_SIZE
) -> Course:
    tensors, times = model
    [course] = courses_of(StepModel(tensors, world_size, times, link, codecs), len(tensors))
    return course


@settings(max_examples=60)
@given(
    st.one_of(chains(max_size=7), unaligned_chains(max_size=7)),
    world_sizes,
    links,
    codecs,
    st.integers(0, 9).map(float),
)
def test_exact_with_a_codec(
    model: Model, world_size: int, link: LinkCost, codecs: CodecCosts, s: float
) -> None:
    tensors, times = model[0], replace(model[1], step_s=s)

    def step_s(plan: BucketPlan) -> float:
        return predict(plan, tensors, times, link, codecs).step_s

    best_s = min(map(step_s, _plans(tensors, world_size, codecs.may_mix)))
    plan = MergeCompFusion().best_plan(StepModel(tensors, world_size, times, link, codecs))
    # One may be faster that cuts a tensor.
    assert step_s(plan) <= best_s * (1 + 1e-9)
    whole = MergeCompFusion().best_plan(
        StepModel(tensors, world_size, replace(times, allows_cuts=False), link, codecs)
    )
    assert step_s(whole) == pytest.approx(best_s, rel=1e-9)
    course = _course((tensors, times), link, codecs, world_size)
    assert best_groupings(course)[0].step_s == pytest.approx(best_s, rel=1e-9)
    assert codecs.may_mix or not plan.uncompressed


@settings(max_examples=3)
@pytest.mark.slow
@given(
    unaligned_chains(max_size=10).filter(lambda one: len(one[0]) > 8), world_sizes, links, codecs
)
def test_exact_for_ten_tensors(
    model: Model, world_size: int, link: LinkCost, codecs: CodecCosts
) -> None:
    tensors, times = model
    course = _course(model, link, codecs, world_size)
    found_s = best_groupings(course)[0].step_s
    best_s = min(
        predict(plan, tensors, times, link, codecs).step_s
        for plan in _plans(tensors, world_size, codecs.may_mix)
    )
    assert found_s == pytest.approx(best_s, rel=1e-9)


@settings(max_examples=40)
@given(unaligned_chains(max_size=9), world_sizes, links)
def test_exact_for_both_halves_without_a_codec(
    model: Model, world_size: int, link: LinkCost
) -> None:
    tensors, times = model
    course = _course(model, link, NO_CODEC, world_size)
    plans = _plans(tensors, world_size, may_mix=False)
    best_s = min(predict(plan, tensors, times, link).step_s for plan in plans)
    assert best_groupings(course)[0].step_s == pytest.approx(best_s)


@pytest.mark.slow
def test_exact_where_thousands_of_ways_are_unbeaten() -> None:
    """Ten tensors of which the best plan is lost if only a few hundred ways are kept."""
    sizes = [5632, 640, 2048, 6912, 5120, 2304, 3584, 11008, 6912, 128]
    uses = [0, 1.453, 1.475, 3.490, 5.136, 5.865, 7.602, 7.792, 9.441, 11.359]
    ready = [28.148, 27.277, 25.573, 24.315, 20.564, 15.556, 11.992, 6.019, 4.433, 1.928]
    tensors = [
        TensorSpec(index, str(index), numel, ITEMSIZE, "", index, len(sizes) - 1 - index)
        for index, numel in enumerate(sizes)
    ]
    by_index = (dict(enumerate(uses)), dict(enumerate(ready)))
    times = ModelTimes(12.479, 28.148, *by_index, step_s=1.456, allows_cuts=False)
    link = LinkCost(0.369, 5.19e-4)
    codecs = CodecCosts(
        CodecCost(
            encode=Linear(0, 1.744e-4),
            decode_sum=Linear(0, 5.099e-4),
            encode_shard=Linear(1.557, 6.356e-4),
            reduce_bytes=Linear(0, 1.298),
            gather_bytes=Linear(0, 1.064),
        ),
        CodecCost(
            decode_sum=Linear(0.1562, 0),
            encode_shard=Linear(0.2731, 6.755e-5),
            decode=Linear(0, 1.46e-4),
        ),
        may_mix=True,
    )
    found = []
    for num_exact in (programme_module.NUM_EXACT, 0):
        with mock.patch.object(programme_module, "NUM_EXACT", num_exact):
            plan = MergeCompFusion().best_plan(StepModel(tensors, WORLD_SIZE, times, link, codecs))
        found.append(predict(plan, tensors, times, link, codecs).step_s)
    assert found[0] < 0.996 * found[1]


@settings(max_examples=40)
@given(unaligned_chains(max_size=8), world_sizes, links)
def test_no_plan_of_neighbours_is_predicted_to_be_faster(
    model: Model, world_size: int, link: LinkCost
) -> None:
    tensors, times = model
    plan = MergeCompFusion().best_plan(StepModel(tensors, world_size, times, link))
    plans = _plans(tensors, world_size, may_mix=False)
    best_s = min(predict(one, tensors, times, link).step_s for one in plans)
    # More buckets must gain more than 0.2 %.
    assert predict(plan, tensors, times, link).step_s <= 1.002 * best_s + 1e-9


@settings(max_examples=20)
@given(unaligned_chains(max_size=30), world_sizes, links, codecs, st.integers(1, 6), st.randoms())
def test_no_simpler_plan_is_predicted_to_be_faster(
    model: Model, size: int, link: LinkCost, codecs: CodecCosts, most: int, random: object
) -> None:
    tensors, times = model
    # Forward reads in any order: the programme is not exact.
    use = list(times.first_use_s.values())
    random.shuffle(use)  # type: ignore[attr-defined]
    times = replace(times, first_use_s=dict(enumerate(use)))

    def step_s(plan: BucketPlan) -> float:
        return predict(plan, tensors, times, link, codecs).step_s

    found = MergeCompFusion(max_pieces=most).best_plan(
        StepModel(tensors, size, times, link, codecs)
    )
    assert found.name == "mergecomp"
    others = [rule.plan(tensors, size) for rule in (NoFusion(), SingleFusion())]
    others.append(ThresholdFusion().plan(tensors, size))
    if codecs.may_mix:
        others += [replace(one, uncompressed=tuple(range(len(one.buckets)))) for one in others]
    search = MergeCompHeuristicFusion()
    others.append(search.best_plan(StepModel(tensors, size, times, link, codecs)))
    # Equal plans may be added up in another order.
    assert step_s(found) <= min(map(step_s, others)) * (1 + 1e-12)


def test_what_is_cheap_to_send_and_dear_to_encode_stays_uncompressed() -> None:
    tensors, times = chain([1, 1, 1, 40], forward_s=[1] * 4, backward_s=[1] * 4)
    link = LinkCost(alpha_s=0.01, beta_s=1 / (UNIT * ITEMSIZE))
    int8 = CodecCost(encode=Linear(9.0), reduce_bytes=Linear(0, 1), gather_bytes=Linear(0, 1))
    costs = CodecCosts(int8, CodecCost(), may_mix=True)
    plan = MergeCompFusion().best_plan(StepModel(tensors, WORLD_SIZE, times, link, costs))
    held = {piece.tensor for number in plan.uncompressed for piece in plan.buckets[number].slices}
    assert held == {0, 1, 2}
    forbidden = replace(costs, may_mix=False)
    plan = MergeCompFusion().best_plan(StepModel(tensors, WORLD_SIZE, times, link, forbidden))
    assert plan.uncompressed == ()


def test_of_too_many_ways_the_promising_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, times = chain([3, 1, 4, 1, 5, 9, 2, 6] * 3, [1.0] * 24, [2.0] * 24)
    link = LinkCost(alpha_s=0.5, beta_s=1 / (UNIT * ITEMSIZE))
    int8 = CodecCost(Linear(0.3, 0.2 / UNIT), *[Linear(0.1, 0.1 / UNIT)] * 3, *[Linear(0, 1)] * 2)
    costs = CodecCosts(int8, CodecCost(encode=Linear(0.1)), may_mix=True)
    course = _course((tensors, times), link, costs)
    best_s = best_groupings(course)[0].step_s
    assert best_groupings(course, known_s=best_s)[0].step_s == best_s
    monkeypatch.setattr(programme_module, "MAX_WAYS", 4)
    found = best_groupings(course)
    assert len(found) <= 4
    assert best_s <= found[0].step_s <= 1.1 * best_s


def test_where_no_way_is_short_enough_simple_plans_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many ways may be dropped as there are, where only so many are kept."""
    tensors, times = chain([3, 1, 4, 1, 5], [1.0] * 5, [2.0] * 5)
    link = LinkCost(alpha_s=0.5, beta_s=1 / (UNIT * ITEMSIZE))
    int8 = CodecCost(Linear(0.3, 0.2 / UNIT), *[Linear(0.1, 0.1 / UNIT)] * 3, *[Linear(0, 1)] * 2)
    costs = CodecCosts(int8, CodecCost(encode=Linear(0.1)), may_mix=True)
    course = _course((tensors, times), link, costs)
    assert best_groupings(course, known_s=0.0) == []
    monkeypatch.setattr(predicting, "_SLACK", 0.0)
    plan = MergeCompFusion().best_plan(StepModel(tensors, WORLD_SIZE, times, link, costs))
    heuristic = MergeCompHeuristicFusion().best_plan(
        StepModel(tensors, WORLD_SIZE, times, link, costs)
    )
    steps_s = [predict(one, tensors, times, link, costs).step_s for one in (plan, heuristic)]
    assert steps_s[0] <= steps_s[1]


def test_families_stay_apart_and_tensors_without_gradient_are_left_out() -> None:
    tensors, times = chain([1] * 6, [1] * 6, [1] * 6)
    tensors = [replace(one, family=f"f{one.index % 2}") for one in tensors]
    tensors.append(TensorSpec(6, "unused", 5, ITEMSIZE, "f0"))
    plan = MergeCompFusion().best_plan(StepModel(tensors, WORLD_SIZE, times, LinkCost(1e3, 1e-6)))
    held = [[piece.tensor for piece in bucket.slices] for bucket in plan.buckets]
    assert held == [[0, 2, 4], [1, 3, 5], [6]]


@settings(max_examples=40)
@given(unaligned_chains(max_size=30), st.integers(1, 12))
def test_small_neighbours_are_joined_until_few_enough_are_left(model: Model, most: int) -> None:
    tensors, times = model
    step = StepModel(tensors, WORLD_SIZE, times, LinkCost(0.0, 0.0))
    pieces, joined = (courses_of(step, count)[0].pieces for count in (len(tensors), most))
    assert len(joined) <= most
    if len(pieces) <= most:
        assert joined == pieces
    indices = [index for piece in joined for index in piece.indices]
    assert indices == [index for piece in pieces for index in piece.indices]
    by_index = {piece.indices[0]: piece for piece in pieces}
    for piece in joined:
        parts = [by_index[index] for index in piece.indices]
        assert piece.nbytes == sum(part.nbytes for part in parts)
        assert piece.aligned_bytes == sum(part.aligned_bytes for part in parts)
        assert piece.ready_s == max(part.ready_s for part in parts)
        assert piece.first_use_s == min(part.first_use_s for part in parts)


def test_the_smallest_are_joined_first() -> None:
    sizes = [9000, 100, 9000, 9000, 200]
    tensors = [TensorSpec(i, f"{i}", size, 1, "f", i, i) for i, size in enumerate(sizes)]
    runs = [[tensor.index for tensor in run] for run in pre_merged(tensors, 3)]
    assert runs == [[0, 1], [2], [3, 4]]


def test_impossible_options_are_refused() -> None:
    with pytest.raises(ValueError, match="max_pieces must be >= 1"):
        MergeCompFusion(max_pieces=0)
