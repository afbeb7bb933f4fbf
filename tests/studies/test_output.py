"""The table, the files, the picture and the bar."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_dear.apps.bench.run import said_of
from lightning_dear.studies.files import (
    RawFile,
    check_is_new,
    join_csv,
    rigs_of,
    steps_file,
    write_summary,
)
from lightning_dear.studies.plot import write_plot
from lightning_dear.studies.progress import Progress
from lightning_dear.studies.records import COMPUTE_ALONE, Row, Step
from lightning_dear.studies.summary import summarize
from lightning_dear.studies.table import format_rows, verdicts
from tests.studies.examples import BOUNDS, POINT, block, rank_block

STEPS = (Step(0.5, 0.1, 0.2, 0.03, 0.04, 40_000_000),)


def rows() -> list[Row]:
    blocks = [
        block("ddp", 0, rank_block(0, 0.625)),
        block(
            "dear",
            0,
            rank_block(0, steps=STEPS, peak_memory_bytes=7_000_000, interface_bytes=41_000_000),
        ),
    ]
    return summarize(POINT, blocks, ["ddp", "dear"], {"dear": "tuned"})


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_the_fastest_is_named_with_what_is_gained() -> None:
    ddp, dear = rows()
    (said,) = verdicts([ddp, dear])
    assert said == "ratio=1: dear is the fastest, 1.25 times as fast as ddp (1.25 to 1.25)."
    for void in ([ddp, replace(dear, is_void=True)], [replace(ddp, is_void=True), dear]):
        (said,) = verdicts(void)
        assert said.endswith(" Not valid: the machine was busy.")
    for other in (replace(dear, ratio=1.25, ratio_max=1.3), replace(dear, ratio_max=1.01)):
        assert list(verdicts([ddp, other])) == ["ratio=1: No entry is clearly faster than ddp."]
    alone = replace(dear, entry=COMPUTE_ALONE)
    assert list(verdicts([ddp, alone])) == []


def test_a_line_says_how_a_block_went() -> None:
    ddp, dear = rows()
    own = block("dear", 2, rank_block(0, steps=STEPS))
    times = "1.25 times as fast as ddp (1.25 to 1.25)"
    assert said_of(own, [ddp, dear]) == f"round 3: dear 500 ms a step, so far {times}"
    first = block("ddp", 0, rank_block(0, 0.625))
    assert said_of(first, [ddp]) == "round 1: ddp 625 ms a step"


def test_a_line_stands_above_the_bar() -> None:
    stream = io.StringIO()
    Progress(10, stream).say("round 1: ddp 625 ms a step")
    assert stream.getvalue() == "round 1: ddp 625 ms a step\n"


def test_steps_are_those_of_every_block_where_no_others_are_left(tmp_path: Path) -> None:
    assert steps_file(tmp_path).name == "blocks.csv"
    (tmp_path / "raw.csv").touch()
    assert steps_file(tmp_path).name == "raw.csv"


def test_the_table_says_what_it_stands_for() -> None:
    text = format_rows(rows())
    assert "ratio=1\n" in text
    assert "mlp, waiting instead of computing, 2 ranks" in text
    assert "links of 800 Mb/s (shaped); scale 20: stands for 800.0 MB on 16000 Mb/s" in text
    assert "forward 100.0 ms, backward 200.0 ms (profile)" in text
    assert "communication/compute 1.33; bound 400.0 ms, DeAR's own 400.0 ms" in text
    cells = {line.split()[0]: line.split() for line in text.splitlines() if line[:2] == "dd"}
    assert cells["ddp"][1:9] == ["625.0", "1.000", "[1.000-1.000]", "-", "-", "-", "-", "-"]
    (dear,) = (line for line in text.splitlines() if line.startswith("dear"))
    assert dear.split()[1:] == [
        *("500.0", "0.800", "[0.800-0.800]", "430.0", "30.0", "40.0", "41.0", "7.0", "0.25"),
        *("0.0", "1.250", "1.250", "tuned"),
    ]


def test_an_unknown_link_has_no_bounds() -> None:
    bounds = replace(BOUNDS, rate=None)
    point = replace(POINT, link_rate_mbit=None, bounds=bounds, scale=1.0)
    text = format_rows(summarize(point, [block("ddp", 0, rank_block(0, 0.625))], ["ddp"]))
    assert "link of unknown rate" in text
    assert "no bounds" in text


def test_emulated_hosts_are_named_above_the_table_and_in_the_summary(tmp_path: Path) -> None:
    point = replace(POINT, rig="2 emulated hosts x 1 ranks")
    emulated = [replace(row, point=point) for row in rows()]
    assert format_rows(emulated).splitlines()[:2] == ["ratio=1", point.rig]
    write_summary(tmp_path / "summary.csv", [*emulated, *rows()])
    lines = read(tmp_path / "summary.csv")
    assert rigs_of(lines) == point.rig
    assert rigs_of([{"entry": "of an earlier version"}]) == ""


def test_points_stand_one_under_the_other_and_no_rows_are_no_table() -> None:
    other = [replace(row, point=replace(POINT, label="ratio=2")) for row in rows()]
    text = format_rows([*rows(), *other])
    assert text.count("RS wait ms") == 2
    assert text.count("step: median of the steps") == 1
    assert format_rows([]) == ""


def test_void_rows_are_named_so() -> None:
    void = [replace(row, is_void=True) for row in rows()]
    assert format_rows(void).count("VOID") == 2


def test_raw_holds_every_step_of_every_rank_as_soon_as_a_block_ends(tmp_path: Path) -> None:
    raw = RawFile(tmp_path / "raw.csv")
    raw.add(POINT, block("ddp", 0, rank_block(0, 0.5, 0.6), rank_block(1, 0.7, 0.87654321)))
    seconds = [line["step_s"] for line in read(tmp_path / "raw.csv")]
    assert seconds == ["0.5", "0.6", "0.7", "0.876543"]
    raw.add(POINT, block("dear", 0, rank_block(0, steps=STEPS)))
    last = read(tmp_path / "raw.csv")[-1]
    assert last["entry"] == "dear"
    assert last["exposed_all_gather_s"] == "0.04"
    assert (last["model"], last["scale"], last["link_rate_mbit"]) == ("mlp", "20.0", "800.0")
    assert last["stands_for_mbit"] == "16000.0"
    assert read(tmp_path / "raw.csv")[0]["exposed_all_gather_s"] == ""
    # Means over the ranks are 0.6 and 0.738.
    steps_s = [line["step_s"] for line in read(tmp_path / "blocks.csv")]
    assert steps_s == ["0.669136", "0.5"]


def test_a_folder_of_an_earlier_run_is_refused(tmp_path: Path) -> None:
    check_is_new(tmp_path)
    RawFile(tmp_path / "raw.csv").add(POINT, block("dear", 0, rank_block(0, steps=STEPS)))
    with pytest.raises(ValueError, match=r"raw\.csv of an earlier run.*hydra\.run\.dir"):
        check_is_new(tmp_path)


def test_the_summary_has_rows_with_bounds_and_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "summary.csv"
    for _ in range(2):
        write_summary(path, rows())
    ddp, dear = read(path)
    assert (ddp["entry"], ddp["ratio"]) == ("ddp", "1.0")
    assert float(dear["bound_s"]) == 0.4
    assert float(dear["over_bound"]) == 1.25
    assert dear["scale"] == "20.0"
    write_summary(path, [])
    assert not path.exists()


def test_files_of_several_groups_are_joined_under_one_title(tmp_path: Path) -> None:
    parts = [tmp_path / "0.csv", tmp_path / "1.csv"]
    for part in parts:
        write_summary(part, rows())
    join_csv(tmp_path / "all.csv", parts)
    assert [line["entry"] for line in read(tmp_path / "all.csv")] == ["ddp", "dear"] * 2


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    write_plot(tmp_path / "plot.png", rows())
    assert (tmp_path / "plot.png").stat().st_size > 5000
    write_plot(tmp_path / "none.png", [])
    assert not (tmp_path / "none.png").exists()


def test_the_bar_tells_the_time_left() -> None:
    clock = [100.0]
    stream = io.StringIO()
    progress = Progress(100, stream, lambda: clock[0])
    progress.begin("ddp")
    assert f"[{24 * '.'}] 0%, now ddp\n" in stream.getvalue()
    for _ in range(20):
        clock[0] += 2
        progress.step()
    assert progress.line().endswith("20%, now ddp, 2 min 40 s left")
    # The first line, and one each 15 s at the end of a step.
    assert stream.getvalue().count("\n") == 3
    clock[0] += 10
    progress.begin("dear")
    assert stream.getvalue().splitlines()[-1].endswith("now dear, 3 min 20 s left")
    clock[0] += 1
    progress.begin("soon after")
    assert "soon after" not in stream.getvalue()
    assert progress.line().startswith("[####....")
