"""dear-recipe: what it finds, prints, writes, and refuses; and what every recipe's page must be."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from tabulate import tabulate

from lightning_dear.apps import programs
from lightning_dear.apps.bench.config import entries_of
from lightning_dear.apps.recipe import run
from lightning_dear.apps.recipe.report import WIDTH, Claim, Report, compared, read_rows
from lightning_dear.paths import conf_dir, recipes_dir
from lightning_dear.studies.block import BlockLength
from tests.apps.test_train import run as run_program

PROGRAM = ("-m", "lightning_dear.apps.recipe")
NAMES = sorted(path.parent.name for path in recipes_dir().glob("*/make.py"))
MOST_LINES, MOST_WORDS, MOST_HELPERS = 40, 600, 2
# A figure in prose: a number, and one of these units.
FIGURE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?) ?(%|x\b|ms\b|s\b|MB/s|GB/s|Gb/s|Mb/s|MiB\b|MB\b)")
PER_UNIT = {"%": 100.0, "ms": 1e3, "MB": 1e-6, "GB/s": 1e-9, "MB/s": 1e-6}


def read_claims(path: Path) -> list[Claim]:
    return [Claim(**row) for row in read_rows(path)]  # type: ignore[arg-type]


def as_markdown(claims: Sequence[Claim]) -> str:
    """Claims as a recipe's page shows them: without columns that say the same in all rows."""
    rows = [asdict(one) for one in claims]
    names = [one.name for one in fields(Claim)]
    shown = [name for name in names if len(rows) == 1 or len({row[name] for row in rows}) > 1]
    titles = [name.replace("_", " ") for name in shown]
    return tabulate([[row[name] for name in shown] for row in rows], titles, tablefmt="github")


def composed(name: str, *overrides: str) -> DictConfig:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose(f"recipe/{name}", list(overrides))


# --- every recipe ---------------------------------------------------------------------------------


def test_every_config_is_a_recipe() -> None:
    assert {path.stem for path in (conf_dir() / "recipe").glob("*.yaml")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_has_its_parts(name: str) -> None:
    cfg = composed(name)
    assert (cfg.name, cfg.measure) == (name, False)
    for one in cfg.siblings.values():
        assert one.program in ("bench", "converge")
        if one.program == "bench":
            _check_length(one)
    folder = recipes_dir() / name
    assert callable(run.load(name).make)
    assert len(list(folder.glob("*.py"))) <= 1 + MOST_HELPERS
    assert (folder / f"{name}.png").stat().st_size > 10_000
    assert read_rows(folder / "summary.csv")
    assert f"({name}/README.md)" in (recipes_dir() / "README.md").read_text()


def _check_length(one: DictConfig) -> None:
    """What a sibling would be refused for, after its ranks had started."""
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = compose(one.program, list(one.overrides))
    BlockLength(cfg.warm_up_steps, cfg.steps)
    assert entries_of(cfg)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_short_and_shows_the_recorded_claims(name: str) -> None:
    folder = recipes_dir() / name
    page, claims = (folder / "README.md").read_text(), read_claims(folder / "claims.csv")
    assert as_markdown(claims) in page
    assert f"dear-recipe {name}" in page
    assert len(page.split()) <= MOST_WORDS
    lines = Report(claims, []).as_text().splitlines()
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= WIDTH


@pytest.mark.parametrize("name", NAMES)
def test_figures_of_a_page_are_recorded(name: str) -> None:
    """A number with a unit stands in the claims or the config, or rounds to a cell of a summary."""
    folder = recipes_dir() / name
    words = (folder / "claims.csv").read_text() + (conf_dir() / f"recipe/{name}.yaml").read_text()
    cells = _numbers(folder.rglob("summary.csv"))
    page = re.sub(r"```.*?```|^\|.*?$|`[^`]*`", "", _page(folder), flags=re.S | re.M)
    unknown = [
        found.group()
        for found in FIGURE.finditer(page)
        if not re.search(rf"(?<![\d.]){re.escape(found[1])}(?![\d.]*\d)", words)
        and not _rounds_to(found[1], PER_UNIT.get(found[2], 1.0), cells)
    ]
    assert not unknown


def _page(folder: Path) -> str:
    return (folder / "README.md").read_text()


def _numbers(files) -> list[float]:
    cells = [cell for file in files for row in read_rows(file) for cell in row.values()]
    return [float(cell) for cell in cells if re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", cell)]


def _rounds_to(figure: str, scale: float, cells: list[float]) -> bool:
    digits = len(figure.partition(".")[2])
    return any(f"{abs(cell) * scale:.{digits}f}" == figure for cell in cells)


# --- the program ----------------------------------------------------------------------------------


def test_names_are_told(capsys, monkeypatch) -> None:
    for arguments, code in (([], 0), (["convergense"], 1)):
        monkeypatch.setattr(sys, "argv", ["dear-recipe", *arguments])
        with pytest.raises(SystemExit) as raised:
            programs.recipe()
        assert raised.value.code == code
        said = "".join(capsys.readouterr())
        assert all(name in said for name in NAMES)
    assert said.startswith("Unknown recipe 'convergense'. Is 'convergence' meant?")


def test_a_run_leaves_everything_in_its_folder(tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in recipes_dir().rglob("*") if path.is_file()}
    result = run_program(tmp_path, "convergence", "hydra.run.dir=out", program=PROGRAM)
    assert result.returncode == 0, result.stderr
    assert "Same as recorded." in result.stdout
    # But for the line that ends with the folder's name.
    assert (
        max(len(line) for line in result.stdout.splitlines() if str(tmp_path) not in line) <= WIDTH
    )
    for file in ("claims.csv", "summary.csv", "convergence.png", "config.yaml"):
        assert (tmp_path / "out" / file).stat().st_size > 50
    after = {path: path.read_bytes() for path in recipes_dir().rglob("*") if path.is_file()}
    assert {p: b for p, b in after.items() if "__pycache__" not in p.parts} == {
        p: b for p, b in before.items() if "__pycache__" not in p.parts
    }


@pytest.mark.alone
def test_something_is_on_the_screen_at_once() -> None:
    begin_s = time.monotonic()
    command = [sys.executable, *PROGRAM, "convergence"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        took_s = time.monotonic() - begin_s
        process.kill()
    assert first.startswith(b"dear-recipe: loading torch and Lightning")
    # Generous: 2 s on a machine that does nothing else.
    assert took_s < 10


# --- what a report is -----------------------------------------------------------------------------

CLAIM = Claim("faster", "83 %", "8 %", "simulated", "Horovod waits 2.5 ms", "5 ms", "no")


def test_a_report_is_written_and_read_back(tmp_path: Path) -> None:
    report = Report([CLAIM], [{"a": 1, "b": None}, {"a": 2.5, "b": "x"}])
    report.write("name", tmp_path)
    assert read_claims(tmp_path / "claims.csv") == [CLAIM]
    assert compared(report.summary, read_rows(tmp_path / "summary.csv")) == "Same as recorded."
    assert "| faster  | 83 %" in as_markdown([CLAIM])


def test_differences_are_named_by_cell(tmp_path: Path) -> None:
    Report([CLAIM], [{"a": 1.0, "b": "x"}] * 20).write("name", tmp_path)
    recorded = read_rows(tmp_path / "summary.csv")
    nearly = [{"a": 1.0 + 1e-9, "b": "x"}] * 20
    assert compared(nearly, recorded) == "Same as recorded."
    said = compared([{"a": 1.1, "b": "x"}, *nearly[1:]], recorded)
    assert said == "Differs from what is recorded in 1 places:\n  row 1, a: 1.1, recorded 1.0"
    assert compared([{"a": 2, "b": "y"}] * 20, recorded).endswith("... and 30 more")
    assert "19 rows, recorded 20" in compared(nearly[1:], recorded)


# --- siblings -------------------------------------------------------------------------------------


def small(measure: bool) -> DictConfig:
    return OmegaConf.create(
        {
            "measure": measure,
            "siblings": {"small": {"program": "bench", "overrides": ["a=1", "b=[c,d]"]}},
        }
    )


def test_what_was_recorded_is_read(tmp_path: Path) -> None:
    one = run.siblings_of(small(measure=False), tmp_path)["small"]
    assert one.rows() == []
    folder = tmp_path / "measured" / "small"
    folder.mkdir(parents=True)
    (folder / "summary.csv").write_text("entry,step_s\nddp,1.5\n")
    assert one.rows() == [{"entry": "ddp", "step_s": "1.5"}]
    said = run.command_of(small(measure=False).siblings.small)
    assert said == "dear-bench a=1 'b=[c,d]'"


def test_measuring_needs_an_emulated_cluster(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(run, "why_unavailable", lambda **_: "no root")
    with pytest.raises(ValueError, match="measure=true needs an emulated cluster: no root"):
        run.measure(small(measure=True), tmp_path)


def test_measuring_keeps_rows_and_says_where(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(run, "why_unavailable", lambda **_: None)

    def pretend(command):
        assert command[1:4] == ["-m", "lightning_dear.apps.bench", "a=1"]
        run_folder = Path(command[-1].partition("=")[2])
        run_folder.mkdir(parents=True)
        (run_folder / "summary.csv").write_text("entry\nddp\n")
        (run_folder / "raw.csv").write_text("megabytes\n")
        return pretend.code

    pretend.code = 0
    monkeypatch.setattr(run.job, "run_child", pretend)
    run.measure(small(measure=True), tmp_path)
    kept = tmp_path / "measured" / "small"
    assert run.siblings_of(small(measure=True), tmp_path)["small"].rows() == [{"entry": "ddp"}]
    assert "torch" in (kept / "machine.txt").read_text()
    assert not (kept / "raw.csv").exists()
    pretend.code = 3
    with pytest.raises(RuntimeError, match="ended with code 3"):
        run.measure(small(measure=True), tmp_path / "again")
