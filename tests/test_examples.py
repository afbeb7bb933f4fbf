"""The scripts in `examples/` train, each as its docstring says to start it."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.distributed.server import free_port

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
TUTORIAL = (ROOT / "docs/tutorial.md").read_text()
TIMEOUT_S = 180
ON_TWO_HOSTS = [[], ["--strategy=ddp"], ["--compressor=int8"]]
NUM_BYTES = 4 * (64 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 10 + 10)
"""Of the gradients in `torchrun.py`."""


def start(command: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    """In a copy of the examples, with the package installed (two paths)."""
    installed = os.pathsep.join(map(str, [ROOT, ROOT / "lightning_dear/_plugins"]))
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": installed, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    """What each has printed; none is left, whatever happens."""
    try:
        said = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(said), "\n".join(said)
    return said


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy = tmp_path / "examples"
    shutil.copytree(EXAMPLES, copy, ignore=shutil.ignore_patterns("__pycache__", "outputs"))
    return copy


def documented(script: str, program: str) -> list[list[str]]:
    """The script's command lines in its docstring, without the program."""
    text = ast.get_docstring(ast.parse((EXAMPLES / script).read_text())) or ""
    lines = re.findall(rf"(?<![\w/]){program} ([^`\n]*{script}[^`\n]*)", text)
    return [shlex.split(line) for line in lines]


def figure(name: str, said: str) -> float:
    (found,) = re.findall(rf"\b{name} (\d+\.\d+)", said)
    return float(found)


def summary(said: str) -> dict[str, float]:
    (found,) = re.findall(r"\{[^{}]*'step_s'[^{}]*\}", said)
    return dict(ast.literal_eval(found))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_each_is_short(script: Path) -> None:
    assert len(script.read_text().splitlines()) <= 60


def test_a_trainer_learns(folder: Path) -> None:
    (command,) = documented("trainer.py", "python")
    (said,) = ended([start([sys.executable, *command], folder)])
    assert figure("accuracy", said) > 0.8
    assert list(folder.rglob("*.ckpt"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ray_train_starts_two_workers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("ray") is None:
        pytest.skip("needs Ray")
    monkeypatch.setenv("RAY_WORKER_GROUP_START_TIMEOUT_S", "400")
    (command,) = documented("ray_train.py", "python")
    (said,) = ended([start([sys.executable, *command], folder)])
    assert "`Trainer.fit` stopped: `max_epochs=2` reached." in said


def test_fabric_learns_and_saves(folder: Path) -> None:
    (command,) = documented("fabric.py", "python")
    (said,) = ended([start([sys.executable, *command], folder)])
    assert figure("loss", said) < 0.5
    assert (folder / "fabric.ckpt").is_file()


@pytest.mark.parametrize(
    "number",
    [pytest.param(0, id="as it is"), pytest.param(1, id="with options", marks=pytest.mark.slow)],
)
def test_a_hydra_application_learns(folder: Path, number: int) -> None:
    command = documented("hydra_app.py", "python")[number]
    (said,) = ended([start([sys.executable, *command], folder)])
    assert figure("loss", said) < 1.5
    # Hydra's own folder has the config, with our groups in it.
    (config,) = folder.glob("outputs/*/*/.hydra/config.yaml")
    assert "lightning_dear.DearStrategy" in config.read_text()
    assert ("compression.Int8" in config.read_text()) == bool(number)


@pytest.mark.parametrize(
    "options",
    [ON_TWO_HOSTS[0], *(pytest.param(one, marks=pytest.mark.slow) for one in ON_TWO_HOSTS[1:])],
    ids=str,
)
def test_two_hosts_meet(folder: Path, options: list[str]) -> None:
    """As two agents of torchrun, which for want of hosts share this one."""
    commands = documented("torchrun.py", "torchrun")
    assert [f"--node-rank={rank}" in one for rank, one in enumerate(commands)] == [True, True]
    here = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    launch = [sys.executable, "-m", "torch.distributed.run"]
    hosts = [[*launch, *one[:-2], *here, one[-1], *options] for one in commands]
    said, other = ended([start(one, folder) for one in hosts])
    assert summary(said).keys() == summary(other).keys()
    is_dear = "--strategy=ddp" not in options
    assert len(list(folder.glob("outputs/*/timeline.png"))) == is_dear
    if is_dear:
        sent = summary(said)["wire_bytes"] / NUM_BYTES
        assert 0.2 < sent < 0.4 if options else 0.9 < sent < 1.2
    else:
        assert summary(said).keys() == {"step_s", "loss"}


def test_the_tutorial_starts_it_so() -> None:
    shell = "".join(re.findall(r"^```sh\n(.*?)^```", TUTORIAL, re.DOTALL | re.MULTILINE))
    shown = [shlex.split(line)[1:] for line in shell.splitlines()]
    first, _ = documented("torchrun.py", "torchrun")
    assert shown == [[*first, *options] for options in ON_TWO_HOSTS[1:]]


@pytest.mark.netns
@pytest.mark.slow
def test_the_tutorials_emulated_hosts(folder: Path) -> None:
    (snippet,) = re.findall(r"^```python\n(.*?)^```", TUTORIAL, re.DOTALL | re.MULTILINE)
    (folder / "emulated.py").write_text(snippet)
    (said,) = ended([start([sys.executable, "emulated.py"], folder)])
    # 4.5 MB at 100 Mb/s, and a share that is hidden.
    assert 0.2 < summary(said)["step_s"] < 2
    assert {*re.findall(r"^\| `(\w+)` \|", TUTORIAL, re.MULTILINE)} == {*summary(said)}
