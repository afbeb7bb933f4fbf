"""Ray Train starts two workers, which train as under `strategy="dear"`.

Run `pip install '.[apps,ray]'` and `python ray_train.py`.
"""

from __future__ import annotations

import ray.train
import torch
from lightning.pytorch import LightningModule, Trainer
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train import lightning as raylight
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_dear.ray import RayDearStrategy


class Digits(LightningModule):
    """One layer. Nothing in here knows of Ray."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(64, 10)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        return functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an ordinary optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def work() -> None:
    """Runs in each worker."""
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images).float() / 16, torch.tensor(labels))
    loader = DataLoader(digits, batch_size=32)
    trainer = Trainer(
        strategy=RayDearStrategy(compressor="bf16"),
        plugins=[raylight.RayLightningEnvironment()],
        callbacks=[raylight.RayTrainReportCallback()],
        max_epochs=2,
    )
    trainer = raylight.prepare_trainer(trainer)
    # After a worker has died, Ray starts all again, with the last checkpoint that was reported.
    if (checkpoint := ray.train.get_checkpoint()) is None:
        trainer.fit(Digits(), loader)
        return
    with checkpoint.as_directory() as folder:
        trainer.fit(Digits(), loader, ckpt_path=f"{folder}/checkpoint.ckpt")


if __name__ == "__main__":
    failures = RunConfig(failure_config=FailureConfig(max_failures=3))
    TorchTrainer(work, scaling_config=ScalingConfig(num_workers=2), run_config=failures).fit()
