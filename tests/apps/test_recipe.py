"""dear-recipe: what it finds, says, writes, and refuses."""

from __future__ import annotations

import csv
import sys
from importlib import import_module
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from lightning_dear.apps.bench.config import entries_of
from lightning_dear.apps.recipe import recipe, sibling
from lightning_dear.apps.recipe.dear_64gpu import make
from lightning_dear.apps.recipe.recipe import RECIPES
from lightning_dear.apps.recipe.report import BEGIN, END, Report, Table, with_section, write_report
from lightning_dear.paths import conf_dir, recipes_dir
from lightning_dear.studies.block import BlockLength
from tests.apps.test_train import run

PROGRAM = ("-m", "lightning_dear.apps.recipe")
FEW = ("models=[resnet50]", "baselines=[ddp,mgwfbp]", "ours=[dear]", "clusters=[ethernet_10g]")
README = f"# Title\n\nwords\n\n{BEGIN}\nold\n{END}\n\nmore words\n"


def composed(name: str, *overrides: str):
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose(f"recipe/{name}", list(overrides))


def check_length(one: DictConfig) -> None:
    """What a sibling would be refused for, after its ranks had started."""
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = compose(one.program, list(one.overrides))
    BlockLength(cfg.warm_up_steps, cfg.steps)
    assert entries_of(cfg)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_its_parts(name: str) -> None:
    cfg = composed(name)
    assert cfg.name == name
    assert cfg.measure is False
    for one in cfg.siblings.values():
        assert one.program in ("bench", "converge")
        if one.program == "bench":
            check_length(one)
    assert callable(import_module(f"lightning_dear.apps.recipe.{name}").make)
    readme = (recipes_dir() / name / "README.md").read_text()
    with_section(readme, "new")
    assert f"dear-recipe {name}" in readme
    assert f"({name}/README.md)" in (recipes_dir() / "README.md").read_text()


def test_every_config_is_a_recipe() -> None:
    assert {path.stem for path in (conf_dir() / "recipe").glob("*.yaml")} == set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_run_wrote_stands_in_the_readme(name: str) -> None:
    """In the words of its table.txt, which a run writes as well."""
    folder = recipes_dir() / name
    readme = (folder / "README.md").read_text()
    summary = (folder / "table.txt").read_text().rstrip().split("\n\n")[-1].splitlines()
    assert summary
    assert all(f"- {sentence}" in readme for sentence in summary)
    assert (folder / f"{name}.png").stat().st_size > 10_000


def test_a_run_leaves_everything_in_its_folder(tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in recipes_dir().rglob("*") if path.is_file()}
    result = run(tmp_path, "dear_64gpu", *FEW, "hydra.run.dir=out", program=PROGRAM)
    assert result.returncode == 0, result.stderr
    assert "Simulated: step, ms" in result.stdout
    assert "Simulated on `ethernet_10g` (published for DeAR: up to 83 %)" in result.stdout
    assert "Written as well" not in result.stdout
    for file in ("table.txt", "README.md", "dear_64gpu.png", "simulated.csv", "config.yaml"):
        assert (tmp_path / "out" / file).stat().st_size > 50
    with (tmp_path / "out" / "simulated.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["strategy"] for row in rows} == {"ddp", "mgwfbp", "dear"}
    # What was changed on the command line is no recipe of ours.
    after = {path: path.read_bytes() for path in recipes_dir().rglob("*") if path.is_file()}
    assert after == before


def test_another_cluster_takes_the_place_of_all(tmp_path: Path) -> None:
    cfg = composed("dear_64gpu", *FEW[:3], "cluster=infiniband_100g", "world_size=16")
    report = make(cfg, recipes_dir() / "dear_64gpu", tmp_path)
    assert len(report.data["simulated"]) == 3
    assert all(cell["alone_s"] <= cell["step_s"] for cell in report.data["simulated"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("clusters=[ethernet_11g]", "Unknown cluster 'ethernet_11g'; valid ones: aries"),
        ("models=[bert_huge]", "Unknown profile 'bert_huge'"),
        ("baselines=[dpp]", "Unknown strategy 'dpp'"),
        ("baselines=ddp", r"baselines must be a list of names, such as baselines=\[ddp\]"),
    ],
)
def test_what_does_not_exist_is_refused(tmp_path: Path, override: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(composed("dear_64gpu", *FEW, override), recipes_dir() / "dear_64gpu", tmp_path)


def test_names_are_told(capsys, monkeypatch) -> None:
    for arguments, code in (([], 0), (["dear_65gpu"], 1)):
        monkeypatch.setattr(sys, "argv", ["dear-recipe", *arguments])
        with pytest.raises(SystemExit) as raised:
            recipe.main()
        assert raised.value.code == code
        said = "".join(capsys.readouterr())
        assert all(name in said for name in RECIPES)
    assert said.startswith("Unknown recipe 'dear_65gpu'")


# --- what a report is -----------------------------------------------------------------------------

TABLE = Table("measured", "steps", ["entry", "ms"], [["ddp", "1.0"]], "A note.")


def test_a_report_replaces_what_the_last_one_wrote(tmp_path: Path) -> None:
    report = Report(["It is so."], [TABLE], data={"figures": [{"a": 1}, {"a": 2}]})
    write_report(report, "name", tmp_path, README)
    written = (tmp_path / "README.md").read_text()
    assert written.startswith("# Title\n\nwords\n")
    assert written.endswith(f"{END}\n\nmore words\n")
    assert "old" not in written
    assert (
        "- It is so.\n\n**Measured: steps**\n\n| entry | ms |\n| --- | --- |\n| ddp | 1.0 |"
        in written
    )
    assert (tmp_path / "figures.csv").read_text() == "a\n1\n2\n"
    assert (tmp_path / "table.txt").read_text().endswith("It is so.\n")
    # Once more: nothing is left of the first time, and nothing is written twice.
    write_report(report, "name", tmp_path, written)
    assert (tmp_path / "README.md").read_text() == written


@pytest.mark.parametrize("readme", ["no marks", f"{BEGIN} only", f"{END}{BEGIN}"])
def test_a_readme_without_room_is_refused(readme: str) -> None:
    with pytest.raises(ValueError, match="restore them"):
        with_section(readme, "new")


# --- siblings -------------------------------------------------------------------------------------


def siblings_of(measure: bool):
    return OmegaConf.create(
        {
            "measure": measure,
            "siblings": {"small": {"program": "bench", "overrides": ["a=1", "b=[c,d]"]}},
        }
    )


def test_what_was_recorded_is_read(tmp_path: Path) -> None:
    cfg = siblings_of(measure=False)
    assert sibling.measured(cfg, tmp_path, tmp_path / "run") == {"small": []}
    folder = tmp_path / "measured" / "small"
    folder.mkdir(parents=True)
    (folder / "summary.csv").write_text("entry,step_s\nddp,1.5\n")
    (folder / "machine.txt").write_text("a machine\n")
    assert sibling.measured(cfg, tmp_path, tmp_path / "run") == {
        "small": [{"entry": "ddp", "step_s": "1.5"}]
    }
    assert sibling.measured_on(tmp_path, ["small", "other"]) == "a machine"
    assert sibling.command_of(cfg.siblings.small) == "dear-bench a=1 'b=[c,d]'"


def test_measuring_needs_an_emulated_cluster(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sibling, "why_unavailable", lambda **_: "no root")
    with pytest.raises(ValueError, match="measure=true needs an emulated cluster: no root"):
        sibling.measured(siblings_of(measure=True), tmp_path, tmp_path)


def test_measuring_keeps_rows_and_says_where(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sibling, "why_unavailable", lambda **_: None)

    def pretend(command, check):
        assert command[1:4] == ["-m", "lightning_dear.apps.bench", "a=1"]
        run_folder = Path(command[-1].partition("=")[2])
        run_folder.mkdir(parents=True)
        (run_folder / "summary.csv").write_text("entry\nddp\n")
        (run_folder / "raw.csv").write_text("megabytes\n")
        return type("Ended", (), {"returncode": pretend.code})

    pretend.code = 0
    monkeypatch.setattr(sibling.subprocess, "run", pretend)
    rows = sibling.measured(siblings_of(measure=True), tmp_path, tmp_path / "run")
    assert rows == {"small": [{"entry": "ddp"}]}
    kept = tmp_path / "run" / "measured" / "small"
    assert "torch" in (kept / "machine.txt").read_text()
    assert not (kept / "raw.csv").exists()
    pretend.code = 3
    with pytest.raises(RuntimeError, match="ended with 3"):
        sibling.measured(siblings_of(measure=True), tmp_path, tmp_path / "again")
