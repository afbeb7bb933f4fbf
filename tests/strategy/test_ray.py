"""Trainings that Ray Train starts. Skipped without Ray: pip install "lightning-dear[ray]"."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from lightning.pytorch import Trainer

import lightning_dear.ray
from lightning_dear import DearStrategy


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Importing Ray sets variables."""
    with mock.patch.dict(os.environ):
        yield


def test_without_ray_the_name_says_what_to_install() -> None:
    lightning_dear.ray._made.cache_clear()
    with (
        mock.patch("lightning_dear.names.find_spec", return_value=None),
        pytest.raises(ModuleNotFoundError, match=r"pip install \"lightning-dear\[ray\]\""),
    ):
        lightning_dear.ray.RayDearStrategy  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'RayFSDP'"):
        lightning_dear.ray.RayFSDP  # noqa: B018


def test_prepare_trainer_accepts_it_and_options_of_ray_are_refused() -> None:
    pytest.importorskip("ray.train")
    from ray.train.lightning import RayLightningEnvironment, prepare_trainer

    kind: Any = lightning_dear.ray.RayDearStrategy
    for name in ("process_group_backend", "start_method"):
        with pytest.raises(ValueError, match=f"leave out {name}.*TorchConfig"):
            kind(**{name: "gloo"})
    context = mock.Mock(
        **{
            "get_world_size.return_value": 4,
            "get_world_rank.return_value": 3,
            "get_local_rank.return_value": 1,
            "get_node_rank.return_value": 1,
        }
    )
    with (
        mock.patch("ray.train.get_context", return_value=context),
        mock.patch("ray.train.torch.get_device"),
        mock.patch.dict(os.environ, LOCAL_RANK="1"),
    ):
        trainer = Trainer(
            strategy=kind(compressor="int8"),
            plugins=[RayLightningEnvironment()],
            accelerator="cpu",
            devices="auto",
            logger=False,
        )
        assert prepare_trainer(trainer) is trainer
        strategy: Any = trainer.strategy
        assert isinstance(strategy, DearStrategy)
        assert strategy.distributed_sampler_kwargs == {"num_replicas": 4, "rank": 3}
        assert (strategy.launcher, strategy.node_rank) == (None, 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_workers_have_torchruns_weights_also_after_one_has_died(tmp_path: Path) -> None:
    pytest.importorskip("ray.train")
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from tests.strategy import ray_worker

    folders = {name: tmp_path / name for name in ("plain", "whole", "died")}
    for folder in folders.values():
        folder.mkdir()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node=2 -m tests.strategy."
    command = [sys.executable, *f"{torchrun}ray_worker".split(), str(folders["plain"])]
    subprocess.run(command, env=environment, check=True, timeout=120)
    variables = {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    # Workers may need minutes to start on a small machine.
    variables["RAY_WORKER_GROUP_START_TIMEOUT_S"] = "400"
    with mock.patch.dict(os.environ, variables):
        ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": variables})
        try:
            for name in ("whole", "died"):
                TorchTrainer(
                    ray_worker.work,
                    train_loop_config={"folder": str(folders[name]), "dies": name == "died"},
                    scaling_config=ScalingConfig(num_workers=2),
                    run_config=RunConfig(
                        name=name,
                        storage_path=str(tmp_path / "ray"),
                        failure_config=FailureConfig(max_failures=1),
                    ),
                ).fit()
        finally:
            ray.shutdown()
    said = {
        name: [(folder / f"rank{rank}").read_text() for rank in (0, 1)]
        for name, folder in folders.items()
    }
    assert said["plain"] == [said["plain"][0]] * 2
    assert said["plain"][0].startswith("2 80 ")
    assert said["whole"] == said["died"] == said["plain"]
    assert (folders["died"] / "resumed").exists()
    assert not (folders["whole"] / "resumed").exists()
