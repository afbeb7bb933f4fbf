"""The table, the files, the picture and the bar."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from lightning_dear.paths import recipes_dir
from lightning_dear.studies.comparison import (
    describe,
    draw,
    join_parts,
    said_of,
    text_of,
    verdicts,
)
from lightning_dear.studies.files import Line, append_lines, write_lines
from lightning_dear.studies.progress import Progress
from lightning_dear.studies.report import Report, show
from lightning_dear.studies.summary import COMPUTE_ALONE, WORDS, raw_lines
from lightning_dear.studies.table import WIDTH, format_table
from tests.studies.examples import POINT, block, rank_block, rank_of_steps, rows_of

STEP = (0.5, 0.1, 0.2, 0.03, 0.04, 40_000_000)


def rows() -> list[Line]:
    load = {"peak_memory_bytes": 7_000_000, "host_bytes": 41_000_000.0}
    blocks = [
        block("ddp", 0, rank_block(0, 0.625)),
        block("dear", 0, rank_of_steps(0, STEP, **load)),
    ]
    return rows_of(POINT, blocks, ["ddp", "dear"], dear="tuned")


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_the_fastest_is_named_with_what_is_gained() -> None:
    ddp, dear = rows()
    (said,) = verdicts([ddp, dear])
    assert said == "ratio=1: dear is the fastest, 1.25 times as fast as ddp (1.25 to 1.25)."
    for void in ([ddp, {**dear, "is_void": True}], [{**ddp, "is_void": True}, dear]):
        (said,) = verdicts(void)
        assert said.endswith(" Not valid: the machine was busy.")
    for other in ({**dear, "ratio": 1.25, "ratio_max": 1.3}, {**dear, "ratio_max": 1.01}):
        assert list(verdicts([ddp, other])) == ["ratio=1: No entry is clearly faster than ddp."]
    alone = {**dear, "entry": COMPUTE_ALONE}
    assert list(verdicts([ddp, alone])) == []


def test_a_line_says_how_a_block_went() -> None:
    ddp, dear = rows()
    own = block("dear", 2, rank_of_steps(0, STEP))
    times = "1.25 times as fast as ddp (1.25 to 1.25)"
    assert said_of(own, [ddp, dear]) == f"round 3: dear 500 ms a step, so far {times}"
    first = block("ddp", 0, rank_block(0, 0.625))
    assert said_of(first, [ddp]) == "round 1: ddp 625 ms a step"


def test_a_line_stands_above_the_bar() -> None:
    stream = io.StringIO()
    Progress(10, stream).say("round 1: ddp 625 ms a step")
    assert stream.getvalue() == "round 1: ddp 625 ms a step\n"


def test_the_table_says_what_it_stands_for() -> None:
    text = text_of(rows())
    assert "ratio=1\n" in text
    assert "mlp, waiting instead of computing, 2 ranks" in text
    assert "links of 800 Mb/s (shaped); scale 20: stands for 800.0 MB on 16000 Mb/s" in text
    assert "forward 100.0 ms, backward 200.0 ms (profile)\n" in text
    assert "communication/compute 1.33; bound 400.0 ms, DeAR's own 400.0 ms" in text
    cells = {line.split()[0]: line.split() for line in text.splitlines() if line[:2] == "dd"}
    assert cells["ddp"][1:9] == ["625.0", "1.000", "[1.000-1.000]", "-", "-", "-", "-", "-"]
    (dear,) = (line for line in text.splitlines() if line.startswith("dear "))
    # Nobody has encoded, and so there is no such column.
    assert dear.split()[1:] == [
        *("500.0", "0.800", "[0.800-0.800]", "430.0", "30.0", "40.0", "41.0", "7.0", "0.25"),
        *("1.250", "1.250"),
    ]
    assert "\ndear: tuned\n" in text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_an_unknown_link_has_no_bounds() -> None:
    said = describe({**rows()[0], "link_rate_mbit": None, "communication_ratio": None})
    assert "link of unknown rate" in said
    assert "no bounds" in said


def test_emulated_hosts_are_named_above_the_table_and_in_the_summary(tmp_path: Path) -> None:
    emulated = [{**row, "rig": "2 emulated hosts x 1 ranks"} for row in rows()]
    assert text_of(emulated).splitlines()[:2] == ["ratio=1", "2 emulated hosts x 1 ranks"]
    write_lines(tmp_path / "summary.csv", emulated)
    assert read(tmp_path / "summary.csv")[0]["rig"] == "2 emulated hosts x 1 ranks"


def test_points_stand_one_under_the_other() -> None:
    other = [{**row, "point": "ratio=2"} for row in rows()]
    text = text_of([*rows(), *other])
    assert text.count("/DeAR") == 3
    assert text.count("step: median of the rounds") == 1


def test_void_rows_are_named_so() -> None:
    void = [{**row, "is_void": True} for row in rows()]
    assert text_of(void).count(" VOID\n") == 2


def test_a_table_keeps_to_a_width_but_breaks_no_name_and_no_figure() -> None:
    titles = ("entry", "MB/step leaves a host", "")
    words = "no name and no figure is ever broken"
    text = format_table(titles, [["dear_mergecomp", "12345.678", words]], 40)
    assert max(map(len, text.splitlines())) <= 40
    assert "dear_mergecomp  12345.678  no name" in text
    assert "MB/step" in text.splitlines()[1]
    assert format_table(titles, [["[bold]", ":smile:", words]]).endswith(f"{words}\n{'-' * 67}")


def test_raw_holds_every_step_of_every_rank(tmp_path: Path) -> None:
    ranks = [rank_block(0, 0.5, 0.6), rank_block(1, 0.7, 0.87654321)]
    own = block("ddp", 0, *ranks)
    append_lines(tmp_path / "raw.csv", raw_lines(POINT, own, ranks))
    seconds = [line["step_s"] for line in read(tmp_path / "raw.csv")]
    assert seconds == ["0.5", "0.6", "0.7", "0.876543"]
    ours = rank_of_steps(0, STEP)
    append_lines(tmp_path / "raw.csv", raw_lines(POINT, block("dear", 0, ours), [ours]))
    last = read(tmp_path / "raw.csv")[-1]
    assert last["entry"] == "dear"
    assert last["exposed_all_gather_s"] == "0.04"
    assert (last["model"], last["scale"], last["link_rate_mbit"]) == ("mlp", "20.0", "800.0")
    assert last["stands_for_mbit"] == "16000.0"
    assert read(tmp_path / "raw.csv")[0]["exposed_all_gather_s"] == ""
    # Means over the ranks are 0.6 and 0.738.
    assert own["step_s"] == 0.669136


def test_other_columns_are_not_written_into_a_file(tmp_path: Path) -> None:
    append_lines(tmp_path / "raw.csv", [{"a": 1, "b": 2}])
    with pytest.raises(ValueError, match="raw.csv has columns of another version"):
        append_lines(tmp_path / "raw.csv", [{"a": 1, "c": 2}])
    write_lines(tmp_path / "raw.csv", [])
    assert list(tmp_path.iterdir()) == []


def test_the_summary_has_rows_with_bounds() -> None:
    ddp, dear = rows()
    assert (ddp["entry"], ddp["ratio"]) == ("ddp", 1.0)
    assert (dear["bound_s"], dear["over_bound"], dear["scale"]) == (0.4, 1.25, 20.0)
    assert (dear["forward_s"], dear["backward_s"]) == (0.1, 0.2)


def test_a_report_is_up_to_date_after_every_block(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known: list[Line] = []
    report = Report(tmp_path, lambda: known, text_of, draw)
    report.write()
    report.finish()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""
    report = Report(tmp_path, lambda: known, text_of, draw)
    known.append(rows()[0])
    report.write()
    names = {"summary.csv", "table.txt", "plot.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    drawn = (tmp_path / "plot.png").stat().st_mtime_ns
    known.append(rows()[1])
    report.write()
    assert [line["entry"] for line in read(tmp_path / "summary.csv")] == ["ddp", "dear"]
    # Drawing takes its time, and is left to the end.
    assert (tmp_path / "plot.png").stat().st_mtime_ns == drawn
    report.finish()
    assert (tmp_path / "plot.png").stat().st_mtime_ns > drawn
    printed = capsys.readouterr().out
    assert printed.startswith((tmp_path / "table.txt").read_text())
    report.finish()
    assert capsys.readouterr().out == ""


def test_parts_are_joined(tmp_path: Path) -> None:
    join_parts(tmp_path)
    assert list(tmp_path.iterdir()) == []
    for number in (0, 1, 10):
        folder = tmp_path / str(number)
        folder.mkdir()
        point = {**POINT, "point": f"ratio={number}"}
        ranks = [rank_block(0, 0.5)]
        own = block("ddp", 0, *ranks)
        append_lines(folder / "blocks.csv", [{**point, **own}])
        append_lines(folder / "summary.csv", rows_of(point, [own], ["ddp"]))
        if number:
            append_lines(folder / "raw.csv", raw_lines(point, own, ranks))
    join_parts(tmp_path)
    for name in ("blocks.csv", "summary.csv"):
        points = [line["point"] for line in read(tmp_path / name)]
        assert points == ["ratio=0", "ratio=1", "ratio=10"]
    assert len(read(tmp_path / "raw.csv")) == 2


@pytest.mark.parametrize(
    "study", ["speed/five_p8", "compression/mergecomp_100mbit", "simulator/a4"]
)
def test_what_earlier_versions_have_recorded_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], study: str
) -> None:
    recorded = (recipes_dir() / study / "summary.csv").read_bytes()
    (tmp_path / "summary.csv").write_bytes(recorded)
    show(tmp_path, WORDS, text_of, draw)
    assert capsys.readouterr().out.count(" waiting instead of computing, ") >= 1
    assert (tmp_path / "plot.png").exists()
    assert read(tmp_path / "summary.csv") == read(recipes_dir() / study / "summary.csv")


def test_another_programs_summary_is_refused(tmp_path: Path) -> None:
    for text in ("", "entry,verdict\ndense,reference\n"):
        (tmp_path / "summary.csv").write_text(text)
        with pytest.raises(ValueError, match=r"has no summary\.csv of this program"):
            show(tmp_path, WORDS, text_of, draw)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    draw(tmp_path / "plot.png", rows())
    assert (tmp_path / "plot.png").stat().st_size > 5000
    assert [path.name for path in tmp_path.iterdir()] == ["plot.png"]


def test_the_bar_tells_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("rich.console.monotonic", lambda: clock[0])
    stream = io.StringIO()
    progress = Progress(100, stream)
    progress.begin("ddp")
    assert stream.getvalue().split()[0] == "0%"
    assert stream.getvalue().endswith("left, now ddp\n")
    for _ in range(20):
        clock[0] += 2
        progress.step()
    # The first line, and one each 15 s at the end of a step.
    assert stream.getvalue().count("\n") == 3
    last = stream.getvalue().splitlines()[-1].split()
    assert (last[0], last[-1]) == ("16%", "ddp")
    assert last[-4] == "0:02:48"
    clock[0] += 8
    progress.leave_out(50)
    progress.begin("[soon] after")
    assert stream.getvalue().splitlines()[-1].split()[0] == "40%"
    assert stream.getvalue().endswith("now [soon] after\n")
    clock[0] += 1
    progress.begin("too soon")
    assert "too soon" not in stream.getvalue()
