"""`dear-train` as a user runs it: real command lines, real ranks."""

import csv
import json
import os
import re
import subprocess
import sys
import time

import pytest
import torch
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

from lightning_dear.apps import job
from lightning_dear.apps.train import train
from lightning_dear.checkpoint import weights
from lightning_dear.paths import conf_dir
from tests.conf.composing import composed, options_of

ROOT = conf_dir().parent
QUICK = ("trainer.enable_progress_bar=false", "model.net.channels=[4,8]", "model.net.num_blocks=1")


def run(folder, *arguments, program=("-m", "lightning_dear.apps.train"), timeout_s=120):
    """Run the command line in `folder` and return what it printed and its exit code."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("HYDRA_FULL_ERROR", None)
    return subprocess.run(
        [sys.executable, *program, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.fixture(scope="module")
def main_job(tmp_path_factory):
    """Run the default job, shortened, once for the tests below; return its result and folder."""
    folder = tmp_path_factory.mktemp("main job")
    result = run(folder, *QUICK, "trainer.max_epochs=1", "hydra.run.dir=out")
    return result, folder / "out"


def test_it_ends_with_the_table(main_job):
    result, _ = main_job
    assert result.returncode == 0, result.stderr
    table = result.stdout[result.stdout.index("digits: DearStrategy, 2 rank(s)") :]
    for title in (
        "test accuracy",
        "step time (median)",
        "bytes on the wire per step and rank",
        "exposed communication per step",
    ):
        assert title in table
    assert "not measured" not in table
    assert table.rstrip().splitlines()[-1].startswith("Config, metrics, logs: /")
    assert result.stdout.count("test accuracy") == 1
    # Lightning's own handler is removed, since Hydra's prints its lines, too.
    assert (result.stdout + result.stderr).count("GPU available") == 1


def test_it_leaves_config_metrics_and_timeline(main_job):
    _, folder = main_job
    config = OmegaConf.load(folder / "config.yaml")
    assert config.trainer.devices == 2
    assert "${" not in (folder / "config.yaml").read_text()
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    for name in ("train_loss", "val_acc", "test_acc"):
        assert any(row[name] for row in rows), name
    assert json.loads((folder / "timeline.json").read_text())
    assert (folder / "timeline.png").stat().st_size > 1000


@pytest.mark.slow
def test_its_checkpoint_is_plain_and_resumes(main_job, tmp_path):
    _, folder = main_job
    (path,) = (folder / "checkpoints").iterdir()
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["global_step"] == 18
    resumed = run(
        tmp_path,
        *QUICK,
        "trainer.max_epochs=2",
        f"ckpt_path='{path}'",
        "strategy=single",
        "hydra.run.dir=out",
    )
    assert resumed.returncode == 0, resumed.stderr
    (later,) = (tmp_path / "out/checkpoints").iterdir()
    # One process sees twice the batches per epoch that each of two did.
    assert torch.load(later, weights_only=True)["global_step"] == 18 + 37


def test_it_starts_with_weights_from_a_safetensors_file(main_job, tmp_path, capsys):
    _, folder = main_job
    (path,) = (folder / "checkpoints").iterdir()
    file = tmp_path / "weights.safetensors"
    weights.export(path, file)
    # With a learning rate of 0 they stay.
    still = ("optimizer.lr=0", "optimizer.weight_decay=0", "strategy=single")
    begun = run(
        tmp_path, *QUICK, *still, "trainer.max_epochs=1", f"init_from='{file}'", "hydra.run.dir=out"
    )
    assert begun.returncode == 0, begun.stderr
    (later,) = (tmp_path / "out/checkpoints").iterdir()
    ended, given = torch.load(later, weights_only=True)["state_dict"], weights.read(file)
    trained = [name for name in given if name.endswith("weight")]
    assert trained
    assert all(torch.equal(ended[name], given[name]) for name in trained)
    for overrides, message in (
        ((f"init_from='{file}'",), "ValueError: init_from=.* has weights of another model"),
        ((f"init_from='{file}'", f"ckpt_path='{path}'"), "ValueError: ckpt_path has weights"),
    ):
        composition = composed(tmp_path, *overrides)
        with composition as config, pytest.raises(SystemExit), job.one_message("dear-train"):
            train.train(config)
        assert re.match(f"dear-train: {message}", capsys.readouterr().err)


SEEN = """
from pathlib import Path
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Callback

class Seen(Callback):
    def on_train_end(self, trainer, pl_module):
        job = HydraConfig.get()
        name = f"rank{trainer.global_rank}.seen"
        seed = f"{job.overrides.task[0]} #{job.job.num}"
        text = f"{trainer.global_rank} of {trainer.world_size}: {seed}"
        Path(job.runtime.output_dir, name).write_text(text)
"""


@pytest.mark.slow
def test_a_sweep_runs_every_job_once_with_all_its_ranks(tmp_path):
    (tmp_path / "seen.py").write_text(SEEN)
    result = run(
        tmp_path,
        "-m",
        "seed=1,2",
        "cluster.devices=2,1",
        "strategy=ddp",
        "callbacks=none",
        "+callbacks.seen._target_=seen.Seen",
        "trainer.fast_dev_run=true",
        "hydra.sweep.dir=out",
        *QUICK,
    )
    assert result.returncode == 0, result.stderr
    jobs = sorted(path for path in (tmp_path / "out").iterdir() if path.is_dir())
    found = {path.name: sorted(file.read_text() for file in path.glob("*.seen")) for path in jobs}
    assert found == {
        "0": ["0 of 2: seed=1 #0", "1 of 2: seed=1 #0"],
        "1": ["0 of 1: seed=1 #1"],
        "2": ["0 of 2: seed=2 #2", "1 of 2: seed=2 #2"],
        "3": ["0 of 1: seed=2 #3"],
    }
    # A child that ran the sweep again would have made a folder of its own.
    assert not (tmp_path / "outputs").exists()


FAILS_ON_RANK_1 = """
from lightning.pytorch import Callback

class Fails(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == 1 and batch_idx == 3:
            raise RuntimeError("the fourth batch is broken")
"""


@pytest.mark.slow
def test_one_failing_rank_ends_all_with_its_message(tmp_path):
    (tmp_path / "fails.py").write_text(FAILS_ON_RANK_1)
    start_s = time.monotonic()
    result = run(tmp_path, "+callbacks.fails._target_=fails.Fails", *QUICK)
    assert result.returncode != 0
    assert time.monotonic() - start_s < 150
    assert "dear-train: [local rank 1] RuntimeError: the fourth batch is broken" in result.stderr
    assert "Traceback (most recent call last)" not in result.stderr


@pytest.mark.slow
def test_an_unknown_name_ends_the_command_with_the_valid_ones(tmp_path):
    result = run(tmp_path, "strategy=nope")
    assert result.returncode == 1
    for option in options_of("strategy"):
        assert option in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) < 30


@pytest.mark.parametrize("group", ["strategy", "compressor", "fusion", "model", "cluster"])
def test_every_group_lists_its_valid_names(group, tmp_path):
    with pytest.raises(MissingConfigException) as caught, composed(tmp_path, f"{group}=nope"):
        pass
    for option in options_of(group):
        assert option in str(caught.value)


@pytest.mark.slow
def test_more_gpus_than_there_are_end_the_command_before_training(tmp_path):
    result = run(tmp_path, "cluster=gpu_host", "cluster.devices=999")
    assert result.returncode == 1
    _, *errors = [line for line in result.stderr.splitlines() if line.startswith("dear-train: ")]
    assert len(errors) == 1
    assert "MisconfigurationException" in errors[0]
    assert "Traceback (most" not in result.stderr
    assert not list(tmp_path.rglob("train_rank1.log"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("fusion.bucket_cap_mb=0", "ValueError: fusion='threshold': bucket_cap_mb must be > 0"),
        ("strategy.gather=everything", "ValueError: .*everything"),
        ("optimizer.lr=-1", "ValueError: Invalid learning rate: -1"),
        ("cluster.interface=eth99", "ValueError: cluster.interface='eth99' is not on this machine"),
    ],
)
def test_an_impossible_option_is_one_message(override, message, tmp_path, capsys):
    quick = ("strategy=single", "trainer.fast_dev_run=true") if "optimizer" in override else ()
    composition = composed(tmp_path, override, *quick)
    with composition as config, pytest.raises(SystemExit), job.one_message("dear-train"):
        train.train(config)
    assert re.match(f"dear-train: {message}", capsys.readouterr().err)
