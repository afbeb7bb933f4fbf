"""The scripts of docs/clusters.md, as they stand there, on two emulated hosts of two ranks each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_dear.emulation import EmulatedCluster, EmulatedHost
from lightning_dear.paths import conf_dir

ROOT = conf_dir().parent
# 2 + 2 ranks share this machine's cores: a tiny model, one batch, and no progress bars.
JOB = (
    "trainer.fast_dev_run=true",
    "trainer.enable_progress_bar=false",
    "model.net.channels=[4,8]",
    "model.net.num_blocks=1",
    "callbacks=none",
    "hydra.run.dir=out",
)

pytestmark = [pytest.mark.netns, pytest.mark.slow]

DEAR_TRAIN = f'#!/bin/sh\nexec {sys.executable} -m lightning_dear.apps.train "$@"\n'

# What srun does for `--nodes=2 --ntasks-per-node=2`: each task on its host, with its numbers. The
# job's own options are the ones that the script has read before.
SRUN = """#!/usr/bin/env bash
[ "$1" = --kill-on-bad-exit=1 ] || exit 9
shift
tasks=()
for task in 0 1 2 3; do
  SLURM_PROCID=$task SLURM_LOCALID=$((task % 2)) SLURM_NODEID=$((task / 2)) \\
    ip netns exec "$PREFIX$((task / 2))" "$@" &
  tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || exit 1; done
"""


@pytest.fixture
def cluster() -> Iterator[EmulatedCluster]:
    with EmulatedCluster(num_hosts=2, rate_mbit=1000) as entered:
        yield entered


def documented(heading: str) -> str:
    """The first script below a heading of the page."""
    text = (ROOT / "docs" / "clusters.md").read_text()
    section = text.split(f"\n## {heading}\n")[1]
    match = re.search(r"```bash\n(.*?)```", section, re.DOTALL)
    assert match
    return match[1]


def with_values(script: str, **values: object) -> str:
    for name, value in values.items():
        script, number = re.subn(rf"(?m)^{name}=\S+", f"{name}={value}", script)
        assert number == 1, name
    return script


def environment(folder: Path, **variables: str) -> dict[str, str]:
    programs = os.pathsep.join((str(folder), str(Path(sys.executable).parent), os.environ["PATH"]))
    return {**os.environ, "PATH": programs, "PYTHONPATH": str(ROOT), **variables}


def start(command: list[str], folder: Path, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment(folder, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def sent_bytes(hosts: tuple[EmulatedHost, ...]) -> list[int]:
    return [host.wire_bytes()[0] for host in hosts]


def test_torchrun_on_two_hosts(cluster: EmulatedCluster, tmp_path: Path) -> None:
    script = with_values(
        documented("torchrun"),
        NUM_HOSTS=2,
        RANKS_PER_HOST=2,
        MASTER_ADDR=cluster.hosts[0].address,
        INTERFACE=cluster.hosts[0].interface,
    )
    path = program(tmp_path / "run.sh", script)
    agents = [
        start(host.command(["bash", str(path), str(host.index), *JOB]), tmp_path)
        for host in cluster.hosts
    ]
    said = [agent.communicate(timeout=200)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(said)
    assert "digits: DearStrategy, 4 rank(s)" in said[0]
    assert min(sent_bytes(cluster.hosts)) > 10_000


def test_slurm_on_two_hosts(cluster: EmulatedCluster, tmp_path: Path) -> None:
    script = with_values(documented("SLURM"), INTERFACE=cluster.hosts[0].interface)
    path = program(tmp_path / "job.sh", script)
    program(tmp_path / "srun", SRUN)
    program(tmp_path / "dear-train", DEAR_TRAIN)
    batch = start(
        ["bash", str(path), *JOB],
        tmp_path,
        PREFIX=cluster.hosts[0].namespace.removesuffix("0"),
        SLURM_JOB_ID="4711",
        SLURM_JOB_NAME="dear",
        SLURM_NNODES="2",
        SLURM_NTASKS="4",
        SLURM_NTASKS_PER_NODE="2",
        SLURM_CPUS_PER_TASK="1",
        SLURM_NODELIST=",".join(host.address for host in cluster.hosts),
    )
    said = batch.communicate(timeout=200)[0]
    assert batch.returncode == 0, said
    assert "digits: DearStrategy, 4 rank(s)" in said
    assert min(sent_bytes(cluster.hosts)) > 10_000
