"""The dynamic programme is exact: against every grouping there is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dear.planning import (
    LinkCost,
    MergeCompFusion,
    ModelTimes,
    NoFusion,
    TensorSpec,
    choose_early,
    predict,
)
from lightning_dear.planning.fusion import fuse_groups
from lightning_dear.planning.programme import Codec, Piece, best_groupings, pre_merged
from tests.planning.models import ITEMSIZE, UNIT, WORLD_SIZE, chain, chains, links

Model = tuple[list[TensorSpec], ModelTimes]
codecs = st.builds(
    Codec,
    alpha_s=st.integers(0, 6).map(float),
    beta_s=st.integers(0, 2).map(lambda one: one / (UNIT * ITEMSIZE)),
)


def _groupings(count: int) -> Iterator[list[list[int]]]:
    """Every way to cut 0 ... count-1 into neighbours."""
    for cuts in itertools.product([False, True], repeat=count - 1):
        edges = [0, *(place + 1 for place, is_cut in enumerate(cuts) if is_cut), count]
        yield [list(range(*span)) for span in itertools.pairwise(edges)]


def _pieces(tensors: list[TensorSpec], times: ModelTimes) -> list[Piece]:
    return [
        Piece(
            (one.index,),
            one.numel * one.itemsize,
            times.ready_s[one.index],
            times.first_use_s[one.index],
        )
        for one in sorted(tensors, key=lambda one: one.ready)
    ]


def _simulated_s(
    groups: list[list[int]], pieces: list[Piece], link: LinkCost, codec: Codec, lengths: tuple
) -> float:
    """Step time of a grouping by plain simulation: encode on the computing side, then the link."""
    forward_s, backward_s = lengths
    link_free_s = encoded_s = 0.0
    for group in groups:
        nbytes = sum(pieces[place].nbytes for place in group)
        encoded_s += codec.alpha_s + codec.beta_s * nbytes
        ready_s = max(pieces[place].ready_s for place in group) + encoded_s
        link_free_s = max(link_free_s, ready_s) + link.reduce_scatter_s(nbytes, WORLD_SIZE)
    gathered_s = late_s = 0.0
    for group in reversed(groups):
        gathered_s += link.all_gather_s(sum(pieces[place].nbytes for place in group), WORLD_SIZE)
        first_use_s = min(pieces[place].first_use_s for place in group)
        late_s = max(late_s, gathered_s - first_use_s)
    return max(link_free_s, backward_s + encoded_s) + late_s + forward_s


@settings(max_examples=40)
@given(chains(max_size=9), links, codecs)
def test_exact_for_both_halves(model: Model, link: LinkCost, codec: Codec) -> None:
    tensors, times = model
    pieces = _pieces(tensors, times)
    lengths = times.forward_s, times.backward_s
    best_s = min(
        _simulated_s(groups, pieces, link, codec, lengths) for groups in _groupings(len(pieces))
    )
    kept = best_groupings(pieces, link.alpha_s, link.beta_s / 2, codec)
    found_s = min(
        _simulated_s(
            [list(range(*span)) for span in itertools.pairwise([0, *one.cuts()])],
            pieces,
            link,
            codec,
            lengths,
        )
        for one in kept
    )
    assert found_s == pytest.approx(best_s)
    # What the programme itself expects is the same.
    nbytes = sum(piece.nbytes for piece in pieces)
    expected_s = min(
        max(one.free_s, times.backward_s + one.num_groups * codec.alpha_s + codec.beta_s * nbytes)
        + max(one.late_s, 0.0)
        for one in kept
    )
    assert expected_s + times.forward_s == pytest.approx(best_s)


@settings(max_examples=40)
@given(chains(max_size=8), links)
def test_no_plan_of_neighbours_is_predicted_to_be_faster(model: Model, link: LinkCost) -> None:
    tensors, times = model
    plan = MergeCompFusion().best_plan(tensors, WORLD_SIZE, times, link)
    order = [one.index for one in sorted(tensors, key=lambda one: one.ready)]
    best_s = min(
        predict(
            fuse_groups(
                "", tensors, WORLD_SIZE, [[order[place] for place in group] for group in groups]
            ),
            tensors,
            times,
            link,
        ).step_s
        for groups in _groupings(len(order))
    )
    # More buckets must gain more than 0.2 %.
    assert predict(plan, tensors, times, link).step_s <= 1.002 * best_s + 1e-9


def test_buckets_suit_early_gathers_too() -> None:
    # Backward leaves the link idle half of the time, and gathers take longer than forward.
    tensors, times = chain([1] * 16, forward_s=[0.5] * 16, backward_s=[2.0] * 16)
    link = LinkCost(alpha_s=0.01, beta_s=2 / (UNIT * ITEMSIZE))
    plan = MergeCompFusion().best_plan(tensors, WORLD_SIZE, times, link)
    assert plan.early
    without = choose_early(NoFusion().plan(tensors, WORLD_SIZE), tensors, times, link)
    predicted = predict(plan, tensors, times, link)
    assert predicted.step_s <= predict(without, tensors, times, link).step_s
    assert predicted.step_s < 1.1 * predicted.bound_s


def test_families_stay_apart_and_tensors_without_gradient_are_left_out() -> None:
    tensors, times = chain([1] * 6, [1] * 6, [1] * 6)
    tensors = [replace(one, family=f"f{one.index % 2}") for one in tensors]
    tensors.append(TensorSpec(6, "unused", 5, ITEMSIZE, "f0"))
    plan = MergeCompFusion().best_plan(tensors, WORLD_SIZE, times, LinkCost(1e3, 1e-6))
    held = [[piece.tensor for piece in bucket.slices] for bucket in plan.buckets]
    assert held == [[0, 2, 4], [1, 3, 5], [6]]


def test_groups_over_a_size_hold_one_piece() -> None:
    tensors, times = chain([1, 1, 5, 1, 1], [0] * 5, [0] * 5)
    size = UNIT * ITEMSIZE
    found = best_groupings(_pieces(tensors, times), 1.0, 0.0, max_bytes=2 * size)
    assert min(one.num_groups for one in found) == 3


@settings(max_examples=40)
@given(chains(max_size=30), st.integers(1, 12))
def test_small_neighbours_are_joined_until_few_enough_are_left(model: Model, most: int) -> None:
    pieces = _pieces(*model)
    joined = pre_merged(pieces, most)
    assert len(joined) <= most
    if len(pieces) <= most:
        assert joined == pieces
    indices = [index for piece in joined for index in piece.indices]
    assert indices == [index for piece in pieces for index in piece.indices]
    by_index = {piece.indices[0]: piece for piece in pieces}
    for piece in joined:
        parts = [by_index[index] for index in piece.indices]
        assert piece.nbytes == sum(part.nbytes for part in parts)
        assert piece.ready_s == max(part.ready_s for part in parts)
        assert piece.first_use_s == min(part.first_use_s for part in parts)


def test_the_smallest_are_joined_first() -> None:
    pieces = [Piece((i,), size, 0.0, 0.0) for i, size in enumerate([9000, 100, 9000, 9000, 200])]
    assert [piece.indices for piece in pre_merged(pieces, 3)] == [(0, 1), (2,), (3, 4)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_pieces": 0}, "max_pieces must be >= 1"),
        ({"encode_alpha_s": -1.0}, "encode_alpha_s must be >= 0"),
        ({"encode_beta_s": float("nan")}, "encode_beta_s must be >= 0"),
    ],
)
def test_impossible_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MergeCompFusion(**options)
