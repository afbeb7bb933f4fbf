"""Trains a small network on handwritten digits, as a Hydra config says: hydra_conf/config.yaml.

Run `python hydra_app.py`, or with options: `python hydra_app.py compressor=int8 max_epochs=2`.
It starts two processes on this machine, needs no GPU, and takes seconds.
"""

from __future__ import annotations

import hydra
import torch
from hydra.utils import instantiate
from lightning.pytorch import LightningModule, Trainer, seed_everything
from omegaconf import DictConfig
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Digits(LightningModule):
    """Two layers. Nothing in here knows of the strategy."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch, and log it."""
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an ordinary optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


@hydra.main(version_base="1.3", config_path="hydra_conf", config_name="config")
def main(config: DictConfig) -> None:
    """Train, and say how well it went. No import of lightning_dear is needed under Hydra."""
    seed_everything(1)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    trainer = Trainer(
        strategy=instantiate(config.strategy, _convert_="all"),
        accelerator="cpu",
        devices=2,
        max_epochs=config.max_epochs,
    )
    trainer.fit(Digits(config.lr), DataLoader(data, batch_size=32, shuffle=True))
    trainer.print(f"loss {trainer.callback_metrics['loss_epoch']:.3f}")


if __name__ == "__main__":
    main()
