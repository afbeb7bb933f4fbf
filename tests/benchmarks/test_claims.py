"""The claim of one entry: its competitor is chosen on other rounds than it is judged on."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from tests.benchmarks.claims import claim_of, format_claims, main, read_rounds, upper_bound

# `fickle` is the best of the others in the first half only.
ROUNDS = {
    "exact": dict.fromkeys(range(10), 1.0),
    "steady": dict.fromkeys(range(10), 1.1),
    "fickle": {number: 0.9 if number < 5 else 2.0 for number in range(10)},
    "compute alone": dict.fromkeys(range(10), 0.5),
}


def test_the_first_half_chooses_and_the_second_judges() -> None:
    claim = claim_of(
        "", ROUNDS, "exact", ["steady", "fickle"], "plan: x, predicted 1.2e+03 ms/step"
    )
    assert (claim.best, claim.ratio, claim.num_rounds) == ("fickle", 0.5, 5)
    assert claim.predicted_s == 1.2
    assert claim.relative["steady"] == 1.1
    assert "nobody" not in claim.relative
    alone = claim_of("", ROUNDS, "exact", ["steady"])
    assert (alone.best, alone.predicted_s) == ("steady", None)


def test_only_rounds_with_both_count() -> None:
    broken_off = {**ROUNDS, "steady": dict.fromkeys(range(7), 1.1)}
    assert claim_of("", broken_off, "exact", ["steady"]).num_rounds == 2
    with pytest.raises(ValueError, match="fewer than two rounds at the only point"):
        claim_of("", {**ROUNDS, "exact": {0: 1.1}}, "exact", ["steady"])


def test_who_takes_part_in_the_first_rounds_only_may_lose_but_not_win() -> None:
    rounds = {**ROUNDS, "slow": dict.fromkeys(range(3), 5.0)}
    claim = claim_of("", rounds, "exact", ["slow", "steady"])
    assert (claim.best, claim.relative["slow"]) == ("steady", 5.0)
    rounds["slow"] = dict.fromkeys(range(3), 1.0)
    with pytest.raises(ValueError, match="slow is the best of the others at the only"):
        claim_of("", rounds, "exact", ["slow", "steady"])
    # Rounds that were slow for all are no disadvantage of who took part in these alone.
    drifting = {name: {one: s * (20 - one) for one, s in of.items()} for name, of in rounds.items()}
    with pytest.raises(ValueError, match="slow is the best"):
        claim_of("", drifting, "exact", ["slow", "steady"])
    # What was measured in the second half alone cannot be chosen.
    rounds["slow"] = dict.fromkeys(range(6, 9), 0.1)
    assert claim_of("", rounds, "exact", ["slow", "steady"]).best == "steady"
    with pytest.raises(
        ValueError, match="nobody was not measured at the only point; there are exa"
    ):
        claim_of("", ROUNDS, "exact", ["nobody"])


@pytest.mark.parametrize(("count", "place"), [(5, 4), (8, 6), (15, 11), (30, 19)])
def test_the_bound_of_a_median(count: int, place: int) -> None:
    """Places are those of the sign test: P(at most `place` heads of `count`) is 95 % or more."""
    assert upper_bound([float(value) for value in range(count)]) == place
    assert upper_bound([1.0] * 4) is None


def tight(table: str) -> str:
    """A Markdown table without the spaces that make its columns equally wide."""
    return re.sub(" +", " ", table)


def write_folder(folder: Path, point: str, num_rounds: int = 12) -> None:
    """What `dear-bench` writes, of two entries and compute alone."""
    folder.mkdir()
    with (folder / "blocks.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["point", "entry", "round", "step_s"])
        for entry, seconds in (("exact", 1.0), ("layerwise", 2.0), ("compute alone", 0.8)):
            # What was tuned does not count.
            writer.writerow([point, entry, -1, 99.0])
            for number in range(num_rounds):
                writer.writerow([point, entry, number, seconds])
    with (folder / "summary.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["point", "entry", "is_void", "note"])
        note = "plan: 3 buckets, predicted 950 ms/step"
        writer.writerow([point, "exact", "False", note])
        writer.writerow([point, "layerwise", "True", ""])
        writer.writerow([point, "compute alone", "False", ""])


def test_folders_become_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--entry", "exact", "--others", "layerwise"]
    first, second = tmp_path / "first", tmp_path / "second"
    write_folder(first, "p")
    write_folder(second, "p")
    assert read_rounds(first)["p"]["exact"] == dict.fromkeys(range(12), 1.0)
    row = "| 2000.0* | 1000.0 | layerwise | 0.500 [0.500] | 0.950 | 2.000 | 0.800 |"
    main([str(first), *arguments])
    assert f"| p {row}" in tight(capsys.readouterr().out)
    main([str(first), str(second), *arguments])
    printed = capsys.readouterr().out
    assert f"| first: p {row}" in tight(printed)
    assert f"| second: p {row}" in tight(printed)
    assert "geometric mean 0.500, largest 0.500, 6 paired rounds" in printed
    assert printed.endswith("\n*: void, the machine was busy.\n")


def test_a_point_that_cannot_be_judged_takes_no_other_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--entry", "exact", "--others", "layerwise"]
    broken_off, whole = tmp_path / "broken_off", tmp_path / "whole"
    write_folder(broken_off, "p", 1)
    write_folder(whole, "q")
    message = "Not judged: There are fewer than two rounds at broken_off: p"
    main([str(broken_off), str(whole), *arguments])
    printed = capsys.readouterr().out
    assert tight(printed).startswith("| point |")
    assert message in printed
    assert "| whole: q |" in tight(printed)
    write_folder(tmp_path / "other", "p", 1)
    with pytest.raises(SystemExit, match=f"{message}.*\n.*other: p"):
        main([str(broken_off), str(tmp_path / "other"), *arguments])


def test_what_is_unknown_is_a_dash() -> None:
    rounds = {name: ROUNDS[name] for name in ("exact", "steady")}
    short = {name: dict(list(of.items())[:4]) for name, of in rounds.items()}
    text = format_claims([claim_of("", short, "exact", ["steady"])], "exact", ["steady"])
    assert (
        tight(text).splitlines()[2]
        == "| - | 1100.0 | 1000.0 | steady | 0.909 [-] | - | 1.100 | - |"
    )


def test_a_folder_of_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"has no blocks\.csv that dear-bench"):
        main([str(tmp_path), "--entry", "exact", "--others", "layerwise"])
    (tmp_path / "blocks.csv").write_text("key,entry,metric\na,dense,1\n")
    with pytest.raises(SystemExit, match=r"has no blocks\.csv that dear-bench"):
        main([str(tmp_path), "--entry", "exact", "--others", "layerwise"])
