"""`cluster=emulated`: the command makes its hosts, runs on them and leaves none."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lightning_dear import emulation
from lightning_dear.apps import job
from lightning_dear.apps.emulated import restart_on_cluster
from lightning_dear.emulation import AS_OWN_ROOT, shell
from lightning_dear.emulation.cluster import NAMESPACES
from lightning_dear.emulation.launch import HOST_VARIABLE
from tests.apps.test_train import QUICK, ROOT, run
from tests.conf.composing import composed

SEEN = """
from pathlib import Path
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Callback

class Seen(Callback):
    def on_train_end(self, trainer, pl_module):
        path = Path(HydraConfig.get().runtime.output_dir, f"rank{trainer.global_rank}.seen")
        place = f"{trainer.local_rank} on host {trainer.node_rank} of {trainer.num_nodes}"
        path.write_text(f"{trainer.global_rank} of {trainer.world_size}, {place}")
"""

MODULE = "lightning_dear.apps.train"


@pytest.mark.slow
@pytest.mark.netns
def test_a_job_runs_on_two_hosts_with_two_ranks_each(tmp_path: Path) -> None:
    before = set(NAMESPACES.glob("*"))
    (tmp_path / "seen.py").write_text(SEEN)
    result = run(
        tmp_path,
        "cluster=emulated",
        "cluster.ranks_per_host=2",
        "callbacks=none",
        "+callbacks.seen._target_=seen.Seen",
        "trainer.fast_dev_run=true",
        "hydra.run.dir=out",
        *QUICK,
    )
    assert result.returncode == 0, result.stderr
    assert "digits: DearStrategy, 4 rank(s)" in result.stdout
    assert result.stdout.count("test accuracy") == 1
    seen = {path.name: path.read_text() for path in (tmp_path / "out").glob("*.seen")}
    assert seen == {
        f"rank{rank}.seen": f"{rank} of 4, {rank % 2} on host {rank // 2} of 2" for rank in range(4)
    }
    config = OmegaConf.load(tmp_path / "out/config.yaml")
    assert (config.trainer.num_nodes, config.trainer.devices) == (2, 2)
    assert config.cluster.beta_s_per_byte == pytest.approx(8e-9)
    assert set(NAMESPACES.glob("*")) == before


@pytest.mark.netns
def test_users_need_no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = f"import torch; open({str(ROOT / 'pyproject.toml')!r})"
    drop = ["setpriv", "--reuid", "nobody", "--regid", "nogroup", "--clear-groups"]
    if subprocess.run([*drop, *AS_OWN_ROOT, sys.executable, "-c", reading], check=False).returncode:
        pytest.skip("others than root cannot make namespaces, or read this checkout or interpreter")
    before = set(NAMESPACES.glob("*"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chmod(folder, 0o777)
        monkeypatch.setenv("HOME", name)
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        job_of = [*QUICK, "cluster=emulated", "trainer.fast_dev_run=true", "hydra.run.dir=out"]
        command = [*drop, sys.executable, "-m", MODULE, *job_of]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
        assert result.returncode == 0, result.stderr
        assert "digits: DearStrategy, 2 rank(s)" in result.stdout
        nobody = pwd.getpwnam("nobody")
        assert {path.stat().st_uid for path in folder.rglob("*")} == {nobody.pw_uid}
    assert set(NAMESPACES.glob("*")) == before


@pytest.mark.slow
@pytest.mark.netns
def test_an_error_on_the_hosts_is_the_commands_own(tmp_path: Path) -> None:
    before = set(NAMESPACES.glob("*"))
    result = run(tmp_path, "cluster=emulated", "cluster.interface=eth9", *QUICK)
    assert result.returncode == 1
    assert "dear-train: [local rank 0] ValueError: cluster.interface='eth9' is not" in result.stderr
    assert "Traceback" not in result.stderr
    assert set(NAMESPACES.glob("*")) == before


def test_without_root_there_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    # As a kernel that keeps namespaces for root.
    monkeypatch.setattr(shell, "AS_OWN_ROOT", ("false",))
    monkeypatch.setattr(shutil, "which", lambda tool: f"/sbin/{tool}")
    with (
        composed(tmp_path, "cluster=emulated") as cfg,
        pytest.raises(SystemExit) as caught,
        job.one_message("dear-train"),
    ):
        restart_on_cluster(cfg, MODULE)
    assert caught.value.code == 1
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("dear-train: EmulationUnavailable: an emulated cluster needs root, or ")


def test_other_clusters_and_the_hosts_themselves_do_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with composed(tmp_path) as cfg:
        assert not restart_on_cluster(cfg, MODULE)
    monkeypatch.setenv(HOST_VARIABLE, "0")
    with composed(tmp_path, "cluster=emulated") as cfg:
        assert not restart_on_cluster(cfg, MODULE)


class _Started:
    """Stands in for the cluster and for the run on it."""

    code = 0

    def __init__(self, **options: Any) -> None:
        self.options = options

    def __enter__(self) -> _Started:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def run(self, cluster: _Started, argv: list[str], **options: Any) -> int:
        assert isinstance(cluster, _Started)
        self.cluster, self.argv, self.run_options = cluster, argv, options
        return self.code


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> _Started:
    monkeypatch.setattr(emulation, "EmulatedCluster", _Started)
    recorder = _Started()
    monkeypatch.setattr(emulation, "run_on_cluster", recorder.run)
    return recorder


def test_the_cluster_is_as_configured_and_the_job_is_repeated(
    tmp_path: Path, started: _Started
) -> None:
    overrides = (
        "cluster.num_hosts=4",
        "cluster.rate_mbit=200",
        "cluster.mtu=1500",
        "cluster.loss=0.1",
    )
    started.code = 3
    with composed(tmp_path, "cluster=emulated", *overrides) as cfg:
        with pytest.raises(SystemExit) as caught:
            restart_on_cluster(cfg, MODULE)
        assert caught.value.code == 3
    assert started.cluster.options == {
        **{"num_hosts": 4, "rate_mbit": 200, "mtu": 1500},
        "socket_buffer_bytes": None,
        "congestion_control": "cubic",
        **{"delay_ms": 0.0, "loss": 0.1},
    }
    assert started.argv[1:3] == ["-m", MODULE]
    for item in ("cluster=emulated", *overrides, f"hydra.run.dir='{tmp_path}'"):
        assert item in started.argv
    assert "cluster.beta_s_per_byte=4e-08" in started.argv
    assert started.run_options["ranks_per_host"] == 1


def test_a_sweeper_is_told_that_it_gets_no_metric(tmp_path: Path) -> None:
    with (
        composed(tmp_path, "cluster=emulated", "optimized_metric=test_acc") as cfg,
        pytest.raises(ValueError, match="optimized_metric=test_acc has no effect.* Leave it out"),
    ):
        restart_on_cluster(cfg, MODULE)
