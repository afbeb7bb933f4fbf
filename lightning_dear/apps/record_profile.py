"""Records the profile of a configured model, to be replayed on more ranks than there are devices.

    python -m lightning_dear.apps.record_profile model=gpt data=source_corpus +output=gpt.json

Takes the groups of `dear-train`; `cluster.accelerator` says where to measure. One rank, no
communication.
"""

from __future__ import annotations

import warnings
from typing import Any

import hydra
import torch
from hydra.utils import instantiate
from lightning.pytorch import LightningModule, seed_everything
from omegaconf import DictConfig

from lightning_dear.apps import job
from lightning_dear.paths import conf_dir
from lightning_dear.workloads.replay.profile import ModelProfile
from lightning_dear.workloads.replay.recording import record_profile


def record(cfg: DictConfig) -> ModelProfile:
    """Measure the configured model on its first training batch and write the profile.

    Args:
        cfg: A job with `output`, the file to write.

    Raises:
        ValueError: If `output` is missing, or not a `.json` file.
    """
    output = str(cfg.get("output", ""))
    if not output.endswith(".json"):
        raise ValueError(f"Say where to write with +output=FILE.json; got {output!r}.")
    seed_everything(cfg.seed, workers=True, verbose=False)
    device = torch.device("cpu" if cfg.cluster.accelerator == "cpu" else "cuda")
    model: LightningModule = instantiate(cfg.model, _convert_="all").to(device)
    batch = model.transfer_batch_to_device(_first_batch(cfg), device, 0)
    with warnings.catch_warnings():
        # There is no trainer here whose logger it could be for.
        warnings.filterwarnings("ignore", message=".*self.log.*trainer.*")
        profile = record_profile(model, batch, name=output.rpartition("/")[2].removesuffix(".json"))
    profile.save(output)
    return profile


def _first_batch(cfg: DictConfig) -> Any:
    datamodule = instantiate(cfg.data, _convert_="all")
    datamodule.prepare_data()
    datamodule.setup("fit")
    return next(iter(datamodule.train_dataloader()))


@hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="train")
def main(cfg: DictConfig) -> None:
    """Record one profile and say what it holds."""
    with job.one_message("record_profile"):
        profile = record(cfg)
    print(f"{cfg.output}: {profile.summary()}")


if __name__ == "__main__":
    main()
