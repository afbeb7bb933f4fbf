"""What each of Ray Train's workers runs, and a plain run of the same."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from typing_extensions import override

from lightning_dear import DearStrategy

NUM_EPOCHS, FAILS_IN = 4, 2


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16)
        )

    @override
    def training_step(self, batch: torch.Tensor, *_: Any) -> torch.Tensor:
        return self.net(batch).square().mean()

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Dies(Callback):
    """Ends rank 1 without a word, once, some time after the checkpoint of an epoch."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    @override
    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        is_time = trainer.current_epoch == FAILS_IN and trainer.global_rank == 1
        if is_time and not self.marker.exists():
            self.marker.touch()
            os._exit(1)


def digest(trainer: Trainer, folder: Path) -> None:
    """Writes the steps and a hash of the weights of this rank."""
    data = b"".join(one.detach().numpy().tobytes() for one in trainer.model.parameters())
    text = f"{trainer.world_size} {trainer.global_step} {hashlib.sha256(data).hexdigest()}"
    (folder / f"rank{trainer.global_rank}").write_text(text)


def fitted(folder: Path, strategy: Any, ckpt_path: Any = None, **options: Any) -> None:
    from ray.train.lightning import prepare_trainer

    seed_everything(1)
    data = torch.randn(160, 16, generator=torch.Generator().manual_seed(0))
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=NUM_EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        **options,
    )
    if not isinstance(strategy, DearStrategy) or "plugins" in options:
        trainer = prepare_trainer(trainer)
    trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=4), ckpt_path=ckpt_path)
    digest(trainer, folder)


def work(config: dict[str, Any]) -> None:
    """Runs in a worker. `config` has a folder, and whether rank 1 dies once."""
    import ray.train
    from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback

    from lightning_dear.ray import RayDearStrategy

    folder = Path(config["folder"])
    callbacks: list[Callback] = [RayTrainReportCallback()]
    if config["dies"]:
        callbacks.append(Dies(folder / "died"))
    options = {"plugins": [RayLightningEnvironment()], "devices": "auto", "callbacks": callbacks}
    if (checkpoint := ray.train.get_checkpoint()) is None:
        fitted(folder, RayDearStrategy(), **options)
        return
    with checkpoint.as_directory() as path:
        (folder / "resumed").touch()
        fitted(folder, RayDearStrategy(), f"{path}/checkpoint.ckpt", **options)


if __name__ == "__main__":
    import sys

    fitted(Path(sys.argv[1]), DearStrategy(), devices=2)
