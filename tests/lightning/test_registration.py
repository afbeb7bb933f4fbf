"""`Trainer(strategy="dear")` and its variants, started by Lightning's own launchers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry

import lightning_dear
from tests.lightning.fitting import assert_differ, assert_same
from tests.lightning.nets import Net, copies

ROOT = Path(__file__).parents[2]
START_METHODS = {
    "dear": "popen",
    "dear_spawn": "spawn",
    "dear_fork": "fork",
    "dear_notebook": "fork",
}
TIMEOUT_S = 120


@pytest.mark.parametrize("name", START_METHODS)
def test_importing_registers(name: str) -> None:
    assert name in StrategyRegistry.available_strategies()
    strategy = StrategyRegistry.get(name)
    assert isinstance(strategy, lightning_dear.DearStrategy)
    assert strategy._start_method == START_METHODS[name]
    trainer = Trainer(strategy=name.upper(), accelerator="cpu", devices=2, logger=False)
    assert isinstance(trainer.strategy, lightning_dear.DearStrategy)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["dear", "dear_spawn", "dear_fork"],
)
def test_a_script_trains_and_leaves_no_process(name: str, tmp_path: Path) -> None:
    script = Path(__file__).with_name("script.py")
    child = subprocess.Popen(
        [sys.executable, str(script), name, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    output, _ = child.communicate(timeout=TIMEOUT_S)
    assert child.returncode == 0, output
    assert _session(child.pid) == []
    ranks = [list(torch.load(tmp_path / f"rank-{rank}.pt").values()) for rank in range(2)]
    assert_same(ranks[1], ranks[0], "weights of rank 1")
    after = torch.load(tmp_path / "after-0.pt").values()
    assert_same(after, ranks[0], "weights after fit")
    assert_differ(copies(Net("mlp", "adamw")), ranks[0])


def _session(leader: int) -> list[str]:
    """Command lines of the living processes of a session; one that is just ending has none."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                command = (entry / "cmdline").read_text().replace("\0", " ")
                if int(fields[3]) == leader and fields[0] != "Z" and command:
                    found.append(command)
            except OSError:
                continue
    return found
