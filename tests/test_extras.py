"""What works where only the base is installed, and how the rest says what it lacks."""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from lightning_dear.names import APPS, need

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {"scikit-learn": "sklearn"}
REMEDY = 'pip install "lightning-dear[apps]"'

TRAINING = """
import lightning_dear, torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_dear.callbacks import TimelineCallback

options = dict(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, max_epochs=1)
options.update(limit_train_batches=8, limit_val_batches=0, enable_checkpointing=False)
trainer = Trainer(strategy="dear", callbacks=[TimelineCallback(step=2)], **options)
trainer.fit(BoringModel())
print("steps:", trainer.global_step)
"""


def installed(requirement: Requirement) -> Distribution | None:
    try:
        return distribution(requirement.name)
    except PackageNotFoundError:
        return None


def with_all_it_needs(requirements: list[str]) -> Iterator[Distribution]:
    """What is installed of requirements, and of theirs, each once."""
    todo, seen = [(Requirement(one), "") for one in requirements], set()
    while todo:
        wanted, extra = todo.pop()
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
            continue
        found = installed(wanted)
        key = (wanted.name, *sorted(wanted.extras))
        if found is None or key in seen:
            continue
        seen.add(key)
        yield found
        theirs = [Requirement(one) for one in found.requires or []]
        todo += [(one, name) for one in theirs for name in ("", *wanted.extras)]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that sees this checkout and what the base brings, and nothing else."""
    folder = tmp_path_factory.mktemp("base")
    links = folder / "links"
    links.mkdir()
    for one in with_all_it_needs(PROJECT["dependencies"]):
        for name in {file.parts[0] for file in one.files or []} - {"..", "__pycache__"}:
            if not (links / name).exists():
                (links / name).symlink_to(Path(str(one.locate_file(name))))
    venv.create(folder / "venv")
    (site_packages,) = folder.glob("venv/lib/python*/site-packages")
    (site_packages / "base.pth").write_text(
        f"{links}\n{ROOT}\n{ROOT / 'lightning_dear/_plugins'}\n"
    )
    return folder / "venv/bin/python"


def run(python: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )


def test_training_needs_no_extra_and_a_picture_does(python: Path, tmp_path: Path) -> None:
    done = run(python, "-c", TRAINING, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("steps: 8\n")
    assert (tmp_path / "timeline.json").is_file()
    assert not (tmp_path / "timeline.png").exists()
    assert done.stderr.count(f"The picture timeline.png needs matplotlib: {REMEDY}") == 1


def test_bayesian_is_refused_when_it_is_asked_for(python: Path, tmp_path: Path) -> None:
    code = "from lightning_dear import DearStrategy; DearStrategy(fusion='bayesian')"
    done = run(python, "-c", code, cwd=tmp_path)
    said = f'ModuleNotFoundError: fusion="bayesian" needs sklearn: {REMEDY}'
    assert done.stderr.splitlines()[-1] == said


@pytest.mark.parametrize("program", ["bench", "converge", "plan", "recipe"])
def test_a_program_says_in_one_sentence_what_it_lacks(
    python: Path, tmp_path: Path, program: str
) -> None:
    arguments = ("dear_fusion",) if program == "recipe" else ()
    done = run(python, "-m", f"lightning_dear.apps.{program}", *arguments, cwd=tmp_path)
    said = f"dear-{program} needs {', '.join(APPS)}: {REMEDY}\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


def test_the_digits_need_an_extra(python: Path, tmp_path: Path) -> None:
    done = run(python, "-m", "lightning_dear.apps.train", cwd=tmp_path)
    assert done.returncode == 1
    assert f"data=digits needs sklearn: {REMEDY}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_other_data_needs_none(python: Path, tmp_path: Path) -> None:
    options = ("experiment=lm", "trainer.max_steps=20", "cluster.devices=1")
    done = run(python, "-m", "lightning_dear.apps.train", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "test bits per byte" in done.stdout


def test_what_is_there_is_not_asked_for() -> None:
    need("this", "sys", "json")
    with pytest.raises(SystemExit, match=r"^this needs no_such, nor_this: .*\[vision\]"):
        need("this", "sys", "no_such", "nor_this", extra="vision", error=SystemExit)


def test_the_lists_of_the_extra_are_the_same() -> None:
    names = [Requirement(one).name for one in PROJECT["optional-dependencies"]["apps"]]
    assert tuple(MODULES.get(name, name) for name in names) == APPS
    base = {Requirement(one).name for one in PROJECT["dependencies"]}
    assert not base & set(names)


def test_the_version_is_said_in_two_places_alike() -> None:
    import lightning_dear

    (cited,) = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited == lightning_dear.__version__
