"""From blocks to rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise, permutations

import pytest

from lightning_dear.studies.records import Step
from lightning_dear.studies.summary import in_turn, summarize
from tests.studies.examples import POINT, block, rank_block


@pytest.mark.parametrize("count", range(1, 8))
def test_each_entry_is_first_and_follows_each_other_equally_often(count: int) -> None:
    names = list(range(count))
    rounds = [in_turn(names, number) for number in range(count if count % 2 == 0 else 2 * count)]
    assert all(sorted(order) == names for order in rounds)
    firsts = Counter(order[0] for order in rounds)
    pairs = Counter(pair for order in rounds for pair in pairwise(order))
    assert firsts == dict.fromkeys(names, len(rounds) // count)
    assert pairs == dict.fromkeys(permutations(names, 2), len(rounds) // count)


def test_a_rank_that_is_late_in_one_step_and_short_in_the_next_makes_no_step_longer() -> None:
    # In both a step takes 3 s, whoever begins it first.
    even = block("ddp", 0, rank_block(0, 3.0, 3.0, 3.0), rank_block(1, 3.0, 3.0, 3.0))
    loose = block("dear", 0, rank_block(0, 4.0, 2.0, 4.0), rank_block(1, 2.0, 4.0, 2.0))
    assert [step.step_s for step in loose.steps] == [3.0, 3.0, 3.0]
    first, second = summarize(POINT, [even, loose], ["ddp", "dear"])
    assert first.step_s == second.step_s == 3.0
    assert second.ratio == 1.0
    assert second.num_steps == 3


def test_what_one_rank_did_not_measure_is_not_known() -> None:
    whole, half = rank_block(0, 1.0), rank_block(1, 2.0)
    known = replace(whole.steps[0], exposed_all_gather_s=0.5)
    one = block("ddp", 0, replace(whole, steps=(known,)), half)
    assert known.exposed_all_gather_s == 0.5
    assert one.steps[0].exposed_all_gather_s is None


def test_ratios_are_taken_within_a_round() -> None:
    # A busy machine makes all of round 1 five times slower: that is no difference of entries.
    blocks = [
        block("ddp", 0, rank_block(0, 1.0)),
        block("dear", 0, rank_block(0, 0.8)),
        block("ddp", 1, rank_block(0, 5.0)),
        block("dear", 1, rank_block(0, 4.5)),
        block("ddp", 2, rank_block(0, 1.0)),
        block("dear", 2, rank_block(0, 0.7)),
    ]
    first, second = summarize(POINT, blocks, ["ddp", "dear"])
    assert (first.ratio, first.ratio_min, first.ratio_max) == (1.0, 1.0, 1.0)
    assert second.ratio == pytest.approx(0.8)
    assert second.ratio_min == pytest.approx(0.7)
    assert second.ratio_max == pytest.approx(0.9)


def test_a_round_that_was_broken_off_counts_as_far_as_it_goes() -> None:
    blocks = [
        block("ddp", 0, rank_block(0, 2.0)),
        block("dear", 0, rank_block(0, 1.0)),
        block("dear", 1, rank_block(0, 3.0)),
    ]
    rows = summarize(POINT, blocks, ["ddp", "dear", "fsdp2"])
    assert [row.entry for row in rows] == ["ddp", "dear"]
    assert rows[1].ratio == 0.5
    assert rows[1].num_steps == 2
    (alone,) = summarize(POINT, blocks[1:], ["ddp", "dear"])
    assert alone.ratio is None


def test_steps_of_tuning_are_not_counted() -> None:
    blocks = [
        block("dear", -1, rank_block(0, 9.0)),
        block("dear", 0, rank_block(0, 1.0)),
    ]
    (row,) = summarize(POINT, blocks, ["dear"])
    assert (row.step_s, row.num_steps) == (1.0, 1)
    assert summarize(POINT, blocks[:1], ["dear"]) == []


def test_compute_is_what_is_left_of_a_step() -> None:
    steps = (Step(1.0, 0.3, 0.6, 0.1, 0.2, 10), Step(1.2, 0.3, 0.6, 0.1, 0.2, 12))
    (row,) = summarize(POINT, [block("dear", 0, rank_block(0, steps=steps))], ["dear"])
    assert row.compute_s == pytest.approx((0.7 + 0.9) / 2)
    assert (row.exposed_reduce_scatter_s, row.exposed_all_gather_s) == (0.1, 0.2)
    (row,) = summarize(POINT, [block("ddp", 0, rank_block(0, 1.0))], ["ddp"])
    assert row.compute_s is row.exposed_reduce_scatter_s is row.exposed_all_gather_s is None


def test_bytes_that_leave_a_host_are_counted_at_its_interface_for_all_entries() -> None:
    steps = (Step(1.0, 0.3, 0.6, wire_bytes=10), Step(1.0, 0.3, 0.6, wire_bytes=10))
    ours = [rank_block(rank, steps=steps, interface_bytes=8000 + rank) for rank in range(2)]
    ddp = [rank_block(rank, 1.0, 1.0, interface_bytes=0) for rank in range(2)]
    blocks = [block("dear", 0, *ours), block("ddp", 0, *ddp), block("alone", 0, rank_block(0, 1.0))]
    rows = summarize(POINT, blocks, ["dear", "ddp", "alone"])
    assert [row.host_bytes for row in rows] == [4000.25, 0, None]


def test_a_replay_on_a_busy_machine_is_void() -> None:
    calm, busy = rank_block(0, 1.0, machine_use=0.59), rank_block(0, 1.0, machine_use=0.61)
    blocks = [block("ddp", 0, calm), block("dear", 0, calm), block("dear", 1, busy)]
    first, second = summarize(POINT, blocks, ["ddp", "dear"])
    assert not first.is_void
    assert second.is_void
    assert second.machine_use == 0.61
    real = replace(POINT, is_replay=False)
    assert not any(row.is_void for row in summarize(real, blocks, ["ddp", "dear"]))


def test_encoding_makes_no_row_void() -> None:
    """It is printed instead."""
    encoding = replace(rank_block(0, 1.0, 1.0, machine_use=0.9), codec_cpu_s=0.4, codec_use=0.35)
    busy = replace(encoding, codec_use=0.25)
    blocks = [block("topk", 0, encoding), block("dear", 0, encoding), block("dear", 1, busy)]
    first, second = summarize(POINT, blocks, ["topk", "dear"])
    assert not first.is_void
    assert second.is_void
    assert first.codec_s == pytest.approx(0.2)
    assert first.machine_use == 0.9


def test_rows_stand_beside_the_bounds() -> None:
    (row,) = summarize(POINT, [block("dear", 0, rank_block(0, 0.5))], ["dear"])
    assert row.over_bound == pytest.approx(0.5 / 0.4)
    assert row.over_dear_bound == pytest.approx(0.5 / 0.4)
    assert row.cpu_per_rank == 0.25
