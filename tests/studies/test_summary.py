"""From blocks to rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path

import pytest

from lightning_dear.studies.files import append_lines, read_lines
from lightning_dear.studies.rounds import in_turn
from lightning_dear.studies.summary import COMPUTE_ALONE, WORDS, summarize
from tests.studies.examples import POINT, block, rank_block, rank_of_steps, rows_of


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
    assert (loose["step_s"], loose["num_steps"]) == (3.0, 3)
    first, second = rows_of(POINT, [even, loose], ["ddp", "dear"])
    assert first["step_s"] == second["step_s"] == 3.0
    assert second["ratio"] == 1.0
    assert second["num_steps"] == 3


def test_with_local_steps_the_step_that_merges_counts_in_its_round() -> None:
    # Rounds of three steps, of which one waits. The median of all steps would show no wait.
    ranks = [rank_block(rank, 1.0, 1.0, 4.0, 1.0, 1.0, 7.0, 1.0, 1.0, 1.0) for rank in range(2)]
    local = block("dear", 0, *(replace(rank, period=3) for rank in ranks))
    assert (local["step_s"], local["num_steps"]) == (2.0, 9)
    assert block("dear", 0, *ranks)["step_s"] == 1.0


def test_what_one_rank_did_not_measure_is_not_known() -> None:
    known, half = rank_of_steps(0, (1.0, 0.25, 0.5, 0.25, 0.5)), rank_block(1, 2.0)
    one = block("ddp", 0, known, half)
    assert one["exposed_all_gather_s"] is one["compute_s"] is one["wire_bytes"] is None
    assert one["step_s"] == 1.5


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
    assert (first["ratio"], first["ratio_min"], first["ratio_max"]) == (1.0, 1.0, 1.0)
    assert second["ratio"] == pytest.approx(0.8)
    assert second["ratio_min"] == pytest.approx(0.7)
    assert second["ratio_max"] == pytest.approx(0.9)


def test_a_round_that_was_broken_off_counts_as_far_as_it_goes() -> None:
    blocks = [
        block("ddp", 0, rank_block(0, 2.0)),
        block("dear", 0, rank_block(0, 1.0)),
        block("dear", 1, rank_block(0, 3.0)),
    ]
    rows = rows_of(POINT, blocks, ["ddp", "dear", "fsdp2"])
    assert [row["entry"] for row in rows] == ["ddp", "dear"]
    assert rows[1]["ratio"] == 0.5
    assert rows[1]["num_steps"] == 2


def test_steps_of_tuning_are_not_counted() -> None:
    blocks = [
        block("dear", -1, rank_block(0, 9.0)),
        block("dear", 0, rank_block(0, 1.0)),
    ]
    (row,) = rows_of(POINT, blocks, ["dear"])
    assert (row["step_s"], row["num_steps"]) == (1.0, 1)
    assert rows_of(POINT, blocks[:1], ["dear"]) == []


def test_compute_is_what_is_left_of_a_step() -> None:
    rank = rank_of_steps(0, (1.0, 0.3, 0.6, 0.1, 0.2, 10), (1.2, 0.3, 0.6, 0.1, 0.2, 12))
    (row,) = rows_of(POINT, [block("dear", 0, rank)], ["dear"])
    assert row["compute_s"] == pytest.approx((0.7 + 0.9) / 2)
    assert (row["exposed_reduce_scatter_s"], row["exposed_all_gather_s"]) == (0.1, 0.2)
    (row,) = rows_of(POINT, [block("ddp", 0, rank_block(0, 1.0))], ["ddp"])
    assert (
        row["compute_s"] is row["exposed_reduce_scatter_s"] is row["exposed_all_gather_s"] is None
    )


def test_bytes_that_leave_a_host_are_counted_at_its_interface_for_all_entries() -> None:
    ours = [rank_block(rank, 1.0, 1.0, host_bytes=4000 + rank / 2) for rank in range(2)]
    ddp = [rank_block(rank, 1.0, 1.0, host_bytes=0.0) for rank in range(2)]
    blocks = [block("dear", 0, *ours), block("ddp", 0, *ddp), block("alone", 0, rank_block(0, 1.0))]
    rows = rows_of(POINT, blocks, ["dear", "ddp", "alone"])
    assert [row["host_bytes"] for row in rows] == [4000.25, 0, None]


def test_a_replay_on_a_busy_machine_is_void() -> None:
    calm, busy = (rank_block(0, 1.0, machine_use=use, others_use=use) for use in (0.59, 0.61))
    blocks = [block("ddp", 0, calm), block("dear", 0, calm), block("dear", 1, busy)]
    first, second = rows_of(POINT, blocks, ["ddp", "dear"])
    assert not first["is_void"]
    assert second["is_void"]
    assert second["machine_use"] == 0.61
    real = {**POINT, "is_replay": False}
    assert not any(row["is_void"] for row in rows_of(real, blocks, ["ddp", "dear"]))


def test_encoding_makes_no_row_void() -> None:
    """It is printed instead."""
    load = {"machine_use": 0.9, "codec_s": 0.2}
    encoding, busy = (rank_block(0, 1.0, 1.0, **load, others_use=use) for use in (0.55, 0.65))
    blocks = [block("topk", 0, encoding), block("dear", 0, encoding), block("dear", 1, busy)]
    first, second = rows_of(POINT, blocks, ["topk", "dear"])
    assert not first["is_void"]
    assert second["is_void"]
    assert first["codec_s"] == pytest.approx(0.2)
    assert first["machine_use"] == 0.9


def test_rows_stand_beside_the_bounds() -> None:
    (row,) = rows_of(POINT, [block("dear", 0, rank_block(0, 0.5))], ["dear"])
    assert row["over_bound"] == pytest.approx(0.5 / 0.4)
    assert row["over_dear_bound"] == pytest.approx(0.5 / 0.4)
    assert row["cpu_per_rank"] == 0.25
    assert (row["forward_s"], row["backward_s"]) == (0.1, 0.2)


def test_a_model_that_computes_has_the_bounds_of_what_computes_alone() -> None:
    point = {**POINT, "is_replay": False, "forward_s": None, "backward_s": None}
    alone = block(COMPUTE_ALONE, 0, rank_of_steps(0, (0.4, 0.1, 0.2)), number=1)
    blocks = [block("ddp", 0, rank_block(0, 0.8)), alone]
    first, last = summarize(point, blocks)
    assert (first["bound_s"], first["over_bound"]) == (0.4, 2.0)
    assert (last["entry"], last["compute_source"]) == (COMPUTE_ALONE, "measured")
    (first,) = summarize(point, blocks[:1])
    assert first["bound_s"] is first["over_bound"] is None


# --- files --------------------------------------------------------------------------------------


def test_blocks_are_found_again_with_all_that_their_rows_say(tmp_path: Path) -> None:
    split = ((0.5, 0.1, 0.2, 0.03, 0.04, 4e7), (0.7, 0.1, 0.3, 0.05, 0.04, 4.0))
    of_entries = {
        "ddp": [rank_block(rank, 0.625, 0.7, peak_memory_bytes=7) for rank in range(2)],
        "dear": [rank_of_steps(rank, *split, num_buckets=3) for rank in range(2)],
        COMPUTE_ALONE: [rank_block(0, 0.3, 0.4), rank_block(1, 0.3, 0.4)],
    }
    known = [
        {**POINT, **block(name, number, *ranks, number=place, note=name[:2])}
        for number in range(-1, 2)
        for place, (name, ranks) in enumerate(of_entries.items())
    ]
    append_lines(tmp_path / "blocks.csv", known)
    with (tmp_path / "blocks.csv").open("a") as file:
        file.write("ratio=2,mlp,Tr")
    found = read_lines(tmp_path / "blocks.csv", {*WORDS, "rig"})
    assert found == known
    assert [list(map(type, one.values())) for one in found] == [
        list(map(type, one.values())) for one in known
    ]
    rows = summarize(POINT, known)
    append_lines(tmp_path / "summary.csv", rows)
    assert read_lines(tmp_path / "summary.csv", {*WORDS, "rig"}) == rows


def test_words_stay_words(tmp_path: Path) -> None:
    line = {"entry": "1", "note": "", "a": None, "b": True, "c": 2, "d": 0.5, "e": "mlp"}
    append_lines(tmp_path / "a.csv", [line])
    assert read_lines(tmp_path / "a.csv", WORDS) == [line]
    assert read_lines(tmp_path / "b.csv", WORDS) == []
