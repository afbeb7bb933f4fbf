"""From blocks to rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path

import pytest

from lightning_dear.studies.files import append_lines
from lightning_dear.studies.records import COMPUTE_ALONE, Block, Point, Step
from lightning_dear.studies.rounds import in_turn, rounds_to_go
from lightning_dear.studies.summary import (
    block_line,
    raw_lines,
    read_blocks,
    summarize,
    summary_line,
)
from tests.studies.examples import POINT, block, rank_block, rows_of


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
    assert (loose.step_s, loose.num_steps) == (3.0, 3)
    first, second = rows_of(POINT, [even, loose], ["ddp", "dear"])
    assert first.step_s == second.step_s == 3.0
    assert second.ratio == 1.0
    assert second.num_steps == 3


def test_what_one_rank_did_not_measure_is_not_known() -> None:
    whole, half = rank_block(0, 1.0), rank_block(1, 2.0)
    known = replace(whole.steps[0], exposed_all_gather_s=0.5)
    one = block("ddp", 0, replace(whole, steps=(known,)), half)
    assert known.exposed_all_gather_s == 0.5
    assert one.exposed_all_gather_s is None
    assert one.step_s == 1.5


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
    first, second = rows_of(POINT, blocks, ["ddp", "dear"])
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
    rows = rows_of(POINT, blocks, ["ddp", "dear", "fsdp2"])
    assert [row.entry for row in rows] == ["ddp", "dear"]
    assert rows[1].ratio == 0.5
    assert rows[1].num_steps == 2
    (alone,) = rows_of(POINT, blocks[1:], ["ddp", "dear"])
    assert alone.ratio is None


def test_steps_of_tuning_are_not_counted() -> None:
    blocks = [
        block("dear", -1, rank_block(0, 9.0)),
        block("dear", 0, rank_block(0, 1.0)),
    ]
    (row,) = rows_of(POINT, blocks, ["dear"])
    assert (row.step_s, row.num_steps) == (1.0, 1)
    assert rows_of(POINT, blocks[:1], ["dear"]) == []


def test_compute_is_what_is_left_of_a_step() -> None:
    steps = (Step(1.0, 0.3, 0.6, 0.1, 0.2, 10), Step(1.2, 0.3, 0.6, 0.1, 0.2, 12))
    (row,) = rows_of(POINT, [block("dear", 0, rank_block(0, steps=steps))], ["dear"])
    assert row.compute_s == pytest.approx((0.7 + 0.9) / 2)
    assert (row.exposed_reduce_scatter_s, row.exposed_all_gather_s) == (0.1, 0.2)
    (row,) = rows_of(POINT, [block("ddp", 0, rank_block(0, 1.0))], ["ddp"])
    assert row.compute_s is row.exposed_reduce_scatter_s is row.exposed_all_gather_s is None


def test_bytes_that_leave_a_host_are_counted_at_its_interface_for_all_entries() -> None:
    steps = (Step(1.0, 0.3, 0.6, wire_bytes=10), Step(1.0, 0.3, 0.6, wire_bytes=10))
    ours = [rank_block(rank, steps=steps, host_bytes=4000 + rank / 2) for rank in range(2)]
    ddp = [rank_block(rank, 1.0, 1.0, host_bytes=0.0) for rank in range(2)]
    blocks = [block("dear", 0, *ours), block("ddp", 0, *ddp), block("alone", 0, rank_block(0, 1.0))]
    rows = rows_of(POINT, blocks, ["dear", "ddp", "alone"])
    assert [row.host_bytes for row in rows] == [4000.25, 0, None]


def test_a_replay_on_a_busy_machine_is_void() -> None:
    calm, busy = (rank_block(0, 1.0, machine_use=use, others_use=use) for use in (0.59, 0.61))
    blocks = [block("ddp", 0, calm), block("dear", 0, calm), block("dear", 1, busy)]
    first, second = rows_of(POINT, blocks, ["ddp", "dear"])
    assert not first.is_void
    assert second.is_void
    assert second.machine_use == 0.61
    real = replace(POINT, is_replay=False)
    assert not any(row.is_void for row in rows_of(real, blocks, ["ddp", "dear"]))


def test_encoding_makes_no_row_void() -> None:
    """It is printed instead."""
    encoding = rank_block(0, 1.0, 1.0, machine_use=0.9, others_use=0.55, codec_s=0.2)
    busy = replace(encoding, others_use=0.65)
    blocks = [block("topk", 0, encoding), block("dear", 0, encoding), block("dear", 1, busy)]
    first, second = rows_of(POINT, blocks, ["topk", "dear"])
    assert not first.is_void
    assert second.is_void
    assert first.codec_s == pytest.approx(0.2)
    assert first.machine_use == 0.9


def test_rows_stand_beside_the_bounds() -> None:
    (row,) = rows_of(POINT, [block("dear", 0, rank_block(0, 0.5))], ["dear"])
    assert row.over_bound == pytest.approx(0.5 / 0.4)
    assert row.over_dear_bound == pytest.approx(0.5 / 0.4)
    assert row.cpu_per_rank == 0.25


def test_a_model_that_computes_has_the_bounds_of_what_computes_alone() -> None:
    point = replace(POINT, is_replay=False, alone_forward_s=None, alone_backward_s=None)
    steps = (Step(0.4, 0.1, 0.2),)
    alone = block(COMPUTE_ALONE, 0, rank_block(0, steps=steps))
    blocks = [block("ddp", 0, rank_block(0, 0.8)), alone]
    first, last = summarize(point, blocks)
    assert (first.point.bounds.bound_s, first.over_bound) == (0.4, 2.0)
    assert (last.entry, last.point.compute_source) == (COMPUTE_ALONE, "measured")
    assert summarize(point, blocks[:1])[0].point.bounds.bound_s is None


# --- going on -----------------------------------------------------------------------------------

BOTH = {"ddp": None, "dear": None}


def test_rounds_that_are_missing_come_behind_those_that_have_begun() -> None:
    assert rounds_to_go(BOTH, [], 3) == range(3)
    blocks = [block(name, number, rank_block(0, 1.0)) for number in range(2) for name in BOTH]
    assert rounds_to_go(BOTH, blocks, 3) == range(2, 3)
    # One that was broken off is none.
    assert rounds_to_go(BOTH, blocks[:3], 3) == range(2, 4)
    assert rounds_to_go({**BOTH, "wfbp": 1}, blocks, 2) == range(2, 3)
    assert list(rounds_to_go(BOTH, blocks, 2)) == []
    tuning = block("dear", -1, rank_block(0, 1.0))
    assert rounds_to_go(BOTH, [tuning], 1) == range(1)


# --- files --------------------------------------------------------------------------------------

SPLIT = (Step(0.5, 0.1, 0.2, 0.03, 0.04, 40_000_000.0), Step(0.7, 0.1, 0.3, 0.05, 0.04, 4.0))


def measured() -> list[tuple[Point, Block, list]]:
    """What a short run measures: its points, blocks and ranks."""
    of_entries = {
        "ddp": [rank_block(rank, 0.625, 0.7, peak_memory_bytes=7) for rank in range(2)],
        "dear": [rank_block(0, steps=SPLIT, num_buckets=3), rank_block(1, steps=SPLIT)],
        COMPUTE_ALONE: [rank_block(0, 0.3, 0.4), rank_block(1, 0.3, 0.4)],
    }
    points = (POINT, replace(POINT, label="ratio=2", one_way_s=0.4))
    return [
        (point, block(name, number, *ranks, number=place, place=place, note=name[:2]), ranks)
        for point in points
        for number in range(-1, 2)
        for place, (name, ranks) in enumerate(of_entries.items())
    ]


def test_blocks_are_found_again_with_all_that_their_rows_say(tmp_path: Path) -> None:
    known: dict[Point, list[Block]] = {}
    for point, own, _ in measured():
        append_lines(tmp_path / "blocks.csv", [block_line(point, own)])
        known.setdefault(point, []).append(own)
    assert read_blocks(tmp_path) == known
    with (tmp_path / "blocks.csv").open("a") as file:
        file.write("ratio=2,mlp,Tr")
    assert read_blocks(tmp_path) == known


OLD_POINT = ("point", "model", "is_replay", "scale", "link_rate_mbit", "stands_for_mbit")
OLD_STEP = ("step_s", "forward_s", "backward_s", "exposed_reduce_scatter_s", "exposed_all_gather_s")
OLD_BLOCK = (*OLD_POINT, "rate_source", "world_size", "round", "place", "entry", *OLD_STEP)


@pytest.mark.parametrize("name", ["blocks.csv", "raw.csv"])
def test_files_of_earlier_versions_have_the_same_rows(tmp_path: Path, name: str) -> None:
    known: dict[Point, list[Block]] = {}
    for point, own, ranks in measured():
        known.setdefault(point, []).append(own)
        lines = raw_lines(point, own, ranks) if name == "raw.csv" else [block_line(point, own)]
        columns = (*OLD_BLOCK, *(("rank", "step") if name == "raw.csv" else ("num_steps",)))
        append_lines(tmp_path / name, [{key: line[key] for key in columns} for line in lines])
    rows = [summarize(point, blocks) for point, blocks in known.items()]
    expected = [summary_line(row) for of_point in rows for row in of_point]
    for line in expected:
        line["others_use"] = None
    append_lines(tmp_path / "summary.csv", expected)
    found = [row for of in read_blocks(tmp_path).items() for row in summarize(*of)]
    for row, line in zip(found, expected, strict=True):
        own = {**summary_line(row), "others_use": None}
        assert own == {key: pytest.approx(value) for key, value in line.items()}


def test_a_folder_without_blocks_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no blocks\.csv or raw\.csv that dear-bench has"):
        read_blocks(tmp_path)
    (tmp_path / "raw.csv").write_text("key,entry,metric\na,dense,1\n")
    with pytest.raises(ValueError, match=r"has no blocks\.csv"):
        read_blocks(tmp_path)
