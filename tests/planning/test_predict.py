"""A plan's predicted step: by hand, and within its bounds."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

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
    NoFusion,
    SingleFusion,
    TensorSpec,
    predict,
)
from lightning_dear.planning.fusion import fuse_groups
from lightning_dear.planning.measured import NO_CODEC, Train, combined_times, fitted
from tests.planning.models import ITEMSIZE, UNIT, WORLD_SIZE, bounds_s, chain, chains, codecs, links

Model = tuple[list[TensorSpec], ModelTimes]

# A unit takes one second in each half, a start another.
LINK = LinkCost(alpha_s=1.0, beta_s=2 / (UNIT * ITEMSIZE))


@st.composite
def planned(draw: st.DrawFn) -> tuple[BucketPlan, list[TensorSpec], ModelTimes]:
    tensors, times = draw(chains())
    times = replace(times, step_s=draw(st.integers(0, 3)))
    cuts = [draw(st.booleans()) for _ in tensors]
    groups: list[list[int]] = [[]]
    for tensor, is_cut in zip(tensors, cuts, strict=True):
        groups[-1].append(tensor.index)
        if is_cut:
            groups.append([])
    return fuse_groups("some", tensors, WORLD_SIZE, filter(None, groups)), tensors, times


def test_a_step_by_hand() -> None:
    tensors, times = chain([2, 3, 1], forward_s=[1, 4, 2], backward_s=[2, 4, 2])
    plan = NoFusion().plan(tensors, WORLD_SIZE)
    predicted = predict(plan, tensors, replace(times, step_s=6), LINK)
    spans = [(span.lane, span.bucket, span.begin_s, span.end_s) for span in predicted.spans]
    assert spans == [
        ("reduce_scatter", 2, 2, 4),
        ("reduce_scatter", 1, 6, 10),
        ("reduce_scatter", 0, 10, 13),
        # The step: 2, 3 and 1 seconds, each followed by a gather.
        ("all_gather", 0, 15, 18),
        ("all_gather", 1, 18, 22),
        ("all_gather", 2, 22, 24),
    ]
    # Forward begins at 19 and would read at 19, 20 and 24: only the second gather is late.
    assert predicted.step_s == 13 + 6 + 7 + 2
    assert bounds_s(plan, times, LINK) == (max(7 + 8, 12), max(7, 6) + max(8, 6))


# A bucket's encoding takes a second and one for each unit, and so on; a quarter of it travels.
CODEC = CodecCost(
    encode=Linear(1, 1 / UNIT),
    decode_sum=Linear(2),
    encode_shard=Linear(0, 2 / UNIT),
    decode=Linear(0, 1 / UNIT),
    reduce_bytes=Linear(0, 1),
    gather_bytes=Linear(0, 1),
)
CODECS = CodecCosts(CODEC, CodecCost(encode=Linear(0.5)), may_mix=True)


def test_a_step_that_encodes_by_hand() -> None:
    tensors, times = chain([4, 8, 1], forward_s=[1, 4, 2], backward_s=[2, 4, 2])
    plan = replace(NoFusion().plan(tensors, WORLD_SIZE), uncompressed=(2,))
    predicted = predict(plan, tensors, replace(times, step_s=13), LINK, CODECS)
    spans = [(span.lane, span.bucket, span.begin_s, span.end_s) for span in predicted.spans]
    assert spans == [
        # Gradients come at 2, 6 and 8 without encodings, which take 0.5, 9 and 5 seconds.
        ("reduce_scatter", 2, 2.5, 4.5),
        ("reduce_scatter", 1, 15.5, 18.5),
        ("reduce_scatter", 0, 22.5, 24.5),
        # Two of them are decoded until 24.5 and, the last one, 26.5. Then 4 and 4 seconds to step
        # and encode, 8 and 8, and 1.
        ("all_gather", 0, 34.5, 36.5),
        ("all_gather", 1, 50.5, 53.5),
        ("all_gather", 2, 53.5, 55.5),
    ]
    # Forward begins at 51.5 and decodes for 4 seconds at once; it would read at 56.5 and at 60.5,
    # and decodes for 8 in between.
    assert predicted.step_s == 51.5 + 7 + 4 + 8
    # In each half 3 units of time travel compressed and 1 as it is.
    assert bounds_s(plan, times, LINK, CODECS)[1] == max(7, 4) + max(8, 4)


def test_a_wait_for_what_is_to_be_decoded_delays_forward() -> None:
    tensors, times = chain([4, 8], forward_s=[1, 1], backward_s=[1, 1])
    plan = NoFusion().plan(tensors, WORLD_SIZE)
    codecs = CodecCosts(CodecCost(decode=Linear(0.25)))
    predicted = predict(plan, tensors, times, LINK, codecs)
    # Reduced at 1 + 9 + 5; gathered until 20 and 29, where forward would read at 15 and 16.
    assert predicted.step_s == 29 + 0.25 + 1


@settings(max_examples=40)
@given(planned(), links, codecs)
def test_free_codecs_change_nothing_and_others_keep_the_bounds(
    planned: tuple, link: LinkCost, codecs: CodecCosts
) -> None:
    plan, tensors, times = planned
    predicted = predict(plan, tensors, times, link, codecs)
    assert predicted.step_s >= bounds_s(plan, times, link, codecs)[1] * (1 - 1e-12)
    lengths_s = times.forward_s + times.backward_s + times.step_s
    coding_s = sum(
        cost.encode_s + cost.sum_s + cost.publish_s + cost.decode_s for cost in codecs.of_all(plan)
    )
    assert predicted.step_s >= (lengths_s + coding_s) * (1 - 1e-12)
    free = CodecCosts(CodecCost(reduce_bytes=Linear(0, ITEMSIZE), gather_bytes=Linear(0, ITEMSIZE)))
    plain = predict(plan, tensors, times, link)
    assert predict(plan, tensors, times, link, free) == plain
    assert predict(plan, tensors, times, link, NO_CODEC) == plain


@settings(max_examples=40)
@given(planned(), links)
def test_no_step_is_shorter_than_its_bounds(planned: tuple, link: LinkCost) -> None:
    plan, tensors, times = planned
    predicted = predict(plan, tensors, times, link)
    assert predicted.step_s >= bounds_s(plan, times, link)[1] - 1e-9


@settings(max_examples=40)
@given(planned(), links)
def test_the_link_carries_one_exchange_at_a_time_and_gathers_what_was_reduced(
    planned: tuple, link: LinkCost
) -> None:
    plan, tensors, times = planned
    predicted = predict(plan, tensors, times, link)
    assert all(
        one.end_s <= other.begin_s
        for one, other in zip(predicted.spans, predicted.spans[1:], strict=False)
    )
    begins = {(span.lane, span.bucket): span.begin_s for span in predicted.spans}
    ends = {(span.lane, span.bucket): span.end_s for span in predicted.spans}
    assert len(begins) == len(predicted.spans) == 2 * len(plan.buckets)
    for number, bucket in enumerate(plan.buckets):
        assert begins["reduce_scatter", number] >= times.ready_of(bucket)
        assert begins["all_gather", number] >= ends["reduce_scatter", number]
    reduced = [span.bucket for span in predicted.spans if span.lane == "reduce_scatter"]
    assert tuple(reduced) == plan.reduce_order
    gathered = [span.bucket for span in predicted.spans if span.lane == "all_gather"]
    assert tuple(gathered) == plan.gather_order


@settings(max_examples=40)
@given(chains(), links)
def test_one_bucket_overlaps_nothing(model: Model, link: LinkCost) -> None:
    tensors, times = model
    plan = SingleFusion().plan(tensors, WORLD_SIZE)
    nbytes = sum(one.numel for one in tensors) * ITEMSIZE
    expected_s = times.forward_s + times.backward_s + link.all_reduce_s(nbytes, WORLD_SIZE)
    assert predict(plan, tensors, times, link).step_s == pytest.approx(expected_s)


@settings(max_examples=40)
@given(planned(), links)
def test_one_rank_waits_for_nothing(planned: tuple, link: LinkCost) -> None:
    plan, tensors, times = planned
    alone = predict(replace(plan, world_size=1), tensors, times, link)
    assert alone.step_s == pytest.approx(times.forward_s + times.backward_s + times.step_s)


def test_what_has_no_time_is_reduced_last_and_read_last() -> None:
    tensors, times = chain([1, 1], forward_s=[1, 1], backward_s=[1, 1])
    times = replace(times, first_use_s={0: 0.0}, ready_s={0: 2.0})
    plan = NoFusion().plan(tensors, WORLD_SIZE)
    assert times.ready_of(plan.buckets[1]) == times.backward_s
    assert times.first_use_of(plan.buckets[1]) == times.forward_s


def test_what_four_trains_say() -> None:
    # A start takes a second, a byte 2 ms; each train 5 s until its first message is under way.
    few, small = Train(2, 2000, 5 + 2 * (1 + 4)), Train(2, 500, 5 + 2 * (1 + 1))
    many, long = Train(8, 500, 5 + 8 * (1 + 1)), Train(4, 8000, 5 + 4 * (1 + 16))
    trains = {"many": many, "few": few, "small": small, "long": long}
    link = fitted(**trains)
    assert link == LinkCost(alpha_s=1.0, beta_s=0.002)
    assert link.reduce_scatter_s(4000, 4) == 1 + 0.002 * 3000
    assert link.all_reduce_s(4000, 4) == 2 * 7.0
    late = {**trains, "long": replace(long, seconds=long.seconds + 1)}
    assert fitted(**late).beta_s == pytest.approx(0.002, rel=0.02)
    short = {"many": replace(many, seconds=9.0), "long": replace(long, seconds=1.0)}
    assert fitted(**{**trains, **short}) == LinkCost(0.0, 0.0)


def test_times_of_steps_and_ranks_are_combined() -> None:
    rows = [
        ModelTimes(1.0, 9.0, {0: 0.0, 1: 0.5}, {0: 9.0}, 0.1),
        ModelTimes(2.0, 8.0, {0: 0.1, 1: 0.9}, {0: 7.0}, 0.3),
        ModelTimes(9.0, 1.0, {0: 0.2}, {0: 1.0}, 0.2),
    ]
    assert combined_times(rows, median) == ModelTimes(2.0, 8.0, {0: 0.1, 1: 0.7}, {0: 7.0}, 0.2)
    assert combined_times(rows, max) == ModelTimes(9.0, 9.0, {0: 0.2, 1: 0.9}, {0: 9.0}, 0.3)
