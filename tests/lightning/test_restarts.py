"""What torchrun starts again comes back, with rank after rank killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.distributed.harness import run_ranks
from tests.distributed.server import free_port
from tests.lightning.faults import train
from tests.lightning.fitting import assert_same

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(__file__).with_name("restart_script.py"))

pytestmark = pytest.mark.slow


def with_restarts(folder: Path, how: str, kind: str) -> str:
    place = {
        "standalone": ["--standalone"],
        "static": ["--master-addr=127.0.0.1", f"--master-port={free_port()}"],
    }[how]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *place, "--nproc-per-node=2"]
        + ["--max-restarts=2", SCRIPT, str(folder), kind],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("how", ["standalone", "static"])
def test_a_job_survives_two_kills(how: str, tmp_path: Path) -> None:
    with_restarts(tmp_path, how, "trainer")
    uninterrupted = tmp_path / "uninterrupted"
    uninterrupted.mkdir()
    seen = run_ranks(train, 2, uninterrupted, None, init_process_group=False)[0]
    assert_same([torch.load(tmp_path / "weights")], seen[-1:], "weights")


def test_fabric_comes_back_too(tmp_path: Path) -> None:
    with_restarts(tmp_path, "static", "fabric")
    assert (tmp_path / "weights").exists()
