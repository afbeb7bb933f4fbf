"""Regions and the k-th largest number of all ranks, of which everybody must know the same."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_dear.exchange.sparse.entries import (
    Entries,
    Unsent,
    UnsentVelocity,
    added,
    joined,
    unpacked,
)
from lightning_dear.exchange.sparse.regions import (
    OwnerReport,
    Shares,
    divided,
    equal_regions,
    kth_largest,
    regions_of,
    sliced,
    summary_of,
    words_of_slice,
)
from tests.distributed.harness import distributed

SIZES = st.floats(2.0**-149, 2.0**127, width=32)


# --- the k-th largest -----------------------------------------------------------------------------


@given(st.lists(st.lists(SIZES, max_size=30), min_size=1, max_size=4), st.integers(1, 40))
def test_the_kth_largest_is_found_to_the_bit(sets: list[list[float]], k: int) -> None:
    found = kth_largest([torch.tensor(own) for own in sets], [k] * len(sets), lambda _: None)
    for own, number in zip(sets, found, strict=True):
        assert number == (sorted(own, reverse=True)[:k] or [0.0])[-1]


@distributed(world_sizes=(1, 3))
def test_the_kth_largest_of_all_ranks() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    of_all = torch.rand(world_size, 500, generator=torch.Generator().manual_seed(1))
    found = kth_largest([of_all[rank], of_all[rank, :7]], [321, 9], dist.all_reduce)
    assert found[0] == of_all.flatten().sort(descending=True).values[320]
    assert found[1] == of_all[:, :7].flatten().sort().values[-9 if world_size > 1 else 0]


# --- regions --------------------------------------------------------------------------------------


def _places(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    numel = draw(st.integers(1, 5000))
    of_rank = st.lists(st.integers(0, numel - 1), max_size=60, unique=True).map(sorted)
    return numel, draw(st.lists(of_rank, min_size=1, max_size=8))


@given(data=st.data())
@settings(deadline=None)
def test_regions_cover_a_bucket(data: st.DataObject) -> None:
    numel, of_ranks = _places(data.draw)
    regions = _regions([torch.tensor(own, dtype=torch.int64) for own in of_ranks], numel)
    assert len(regions) == len(of_ranks) + 1
    assert regions[0] == 0
    assert regions[-1] == numel
    assert all(begin <= end for begin, end in pairwise(regions))


def _regions(of_ranks: list[Tensor], numel: int) -> list[int]:
    num_ranks = len(of_ranks)
    total = sum(summary_of(own, numel) for own in of_ranks)
    assert isinstance(total, Tensor)
    return regions_of(total, numel, num_ranks).tolist()  # type: ignore[no-any-return]


def test_regions_hold_as_many_numbers_each() -> None:
    """Also where all lie at one end: bins are the finest there is, and are cut in proportion."""
    numel, num_ranks = 1 << 20, 8
    for power in (1, 4, 12):
        own = (torch.rand(20_000, generator=torch.Generator().manual_seed(2)) ** power) * numel
        places = own.long().unique()
        regions = _regions([places] * num_ranks, numel)
        shares = [
            int(((places >= begin) & (places < end)).sum()) / len(places)
            for begin, end in pairwise(regions)
        ]
        assert max(shares) <= (1.3 if power < 12 else 2.5) / num_ranks


def test_regions_of_nothing_are_equal() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    assert _regions([empty] * 3, 100) == equal_regions(100, 3) == [0, 33, 66, 100]


@given(st.lists(st.lists(st.integers(0, 999), unique=True), min_size=2, max_size=5))
def test_summaries_come_back_from_their_slices(of_ranks: list[list[int]]) -> None:
    """Each rank adds up a slice of all ranks' summaries, and everybody puts the sums together."""
    num_ranks, numel = len(of_ranks), 1000
    summaries = [summary_of(torch.tensor(sorted(own)).long(), numel) for own in of_ranks]
    cut = [sliced(own, num_ranks) for own in summaries]
    assert {len(one) for own in cut for one in own} == {words_of_slice(num_ranks)}
    total, of_slices = torch.stack(summaries).sum(0), torch.stack(cut).sum(0, dtype=torch.int32)
    whole = regions_of(total, numel, num_ranks)
    assert torch.equal(regions_of(of_slices, numel, num_ranks), whole)


# --- shares ---------------------------------------------------------------------------------------


@given(
    st.integers(0, 500), st.lists(st.integers(0, 60), min_size=1, max_size=6), st.integers(0, 200)
)
def test_what_is_divided_is_all_of_it_but_for_rounding(
    total: int, weights: list[int], cap: int
) -> None:
    parts = divided(total, weights, cap)
    assert all(0 <= part <= cap for part in parts)
    assert sum(parts) <= total
    if cap * len(weights) >= total:
        assert sum(parts) > total - len(weights)
    for one, other in pairwise(sorted(zip(weights, parts, strict=True))):
        # Whoever has more weight has no smaller part.
        assert one[0] == other[0] or one[1] <= other[1]


def test_shares_by_hand() -> None:
    unknown = Shares.unknown(3)
    reports = [OwnerReport(5, 5, 2.0), OwnerReport(3, 3, 1.5), OwnerReport(0, 0, 0.0)]
    exact = unknown.after(reports, 8, 6, is_exact=True)
    assert exact == Shares(1.5, (5, 3, 0))
    reports = [OwnerReport(5, 9, 2.0), OwnerReport(3, 3, 4.0), OwnerReport(0, 0, 0.0)]
    assert exact.after(reports, 8, 6, is_exact=False) == Shares(2.75, (6, 2, 0))
    # More than its cap goes to the others.
    assert exact.after(reports, 8, 4, is_exact=False).quotas == (4, 4, 0)
    assert exact.after([OwnerReport(0, 0, 0.0)] * 3, 8, 6, is_exact=False) == Shares(0.0, (5, 3, 0))


# --- entries --------------------------------------------------------------------------------------


def test_entries_come_back_from_their_message_whatever_follows() -> None:
    some = Entries(torch.tensor([3, 7, 2**31 - 1]), torch.tensor([-0.0, math.nan, 1e-44]))
    notes = torch.tensor([4, -9], dtype=torch.int32)
    for own in ((), (notes,), (notes, notes[:1])):
        row = torch.cat([some.packed(*own), torch.full((5,), -1, dtype=torch.int32)])
        num_notes = sum(map(len, own))
        back = unpacked(row, num_notes)
        assert row[1 : 1 + num_notes].tolist() == [word for one in own for word in one.tolist()]
        assert back.places.tolist() == some.places.tolist()
        assert torch.equal(back.numbers.view(torch.int32), some.numbers.view(torch.int32))


@given(st.lists(st.integers(0, 30), unique=True), st.lists(st.integers(0, 30), unique=True))
def test_what_is_among_others(places: list[int], others: list[int]) -> None:
    """Zeros, with which static messages are filled up from place 0, are not."""
    own = Entries(torch.tensor([*places, 0]).long(), torch.tensor([*(1.0 for _ in places), 0.0]))
    expected = [*(place in others for place in places), False]
    assert own.are_among(torch.tensor(others).long(), 30).tolist() == expected


@given(st.lists(st.integers(0, 99), unique=True), st.lists(st.integers(0, 100), max_size=5))
def test_cutting_loses_nothing(places: list[int], cuts: list[int]) -> None:
    whole = Entries(torch.tensor(sorted(places)).long(), torch.arange(float(len(places))))
    regions = [0, *sorted(cuts), 100]
    parts = whole.cut(regions)
    for (begin, end), part in zip(pairwise(regions), parts, strict=True):
        assert all(begin <= place < end for place in part.places.tolist())
    assert torch.equal(joined(parts).places, whole.places)
    assert torch.equal(joined(parts).numbers, whole.numbers)


def test_what_travels_as_it_is_keeps_its_precision() -> None:
    """64 bits, with all that was left of earlier steps."""
    worker = Unsent(2, torch.device("cpu"))
    gradients = torch.tensor([1 + 1e-12, 2.0], dtype=torch.float64)
    worker.accumulate(torch.tensor([0.5, 0.0]), None)
    worker.commit()
    worker.flush(gradients, torch.tensor(4.0))
    assert gradients.tolist() == [3 + 1e-12, 2.0]
    assert worker.kept["residual"].tolist() == [0.5, 0.0]
    worker.commit()
    assert not worker.kept["residual"].any()


def test_what_was_not_sent_has_not_arrived() -> None:
    """A static message ends with zeros from place 0, whatever comes of that place."""
    for is_made in (False, True):
        worker = UnsentVelocity(4, torch.device("cpu"), decay=0.9)
        waiting = worker.accumulate(torch.tensor([1.0, 2.0, 3.0, 4.0]), None)
        waiting[[0, 2]] = 0.0
        if is_made:
            worker.commit()
        sent = Entries(torch.tensor([0, 2, 0, 0]), torch.tensor([1.0, 3.0, 0.0, 0.0]))
        worker.settle(sent, sent.are_among(torch.tensor([0, 3]), 4))
        worker.commit()
        assert worker.kept["momentum"].tolist() == [0.0, 2.0, 3.0, 4.0]
        assert worker.kept["residual"].tolist() == [0.0, 2.0, 3.0, 4.0]


def test_both_are_added() -> None:
    one = Entries(torch.tensor([1, 4, 6]), torch.tensor([1.0, 2.0, 3.0]))
    other = Entries(torch.tensor([0, 4], dtype=torch.int32), torch.tensor([8.0, -2.0]))
    total = added(one, other)
    assert total.places.tolist() == [0, 1, 4, 6]
    assert total.numbers.tolist() == [8.0, 1.0, 0.0, 3.0]
