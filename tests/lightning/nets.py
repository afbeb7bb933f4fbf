"""LightningModules around the engine tests' models, and data for Lightning to split over ranks."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.training.models import batch, build, loss_of, optimizer_for

BATCH_SIZE = 2


class Net(LightningModule):
    """One of the engine tests' models with one of their optimizers.

    Attributes:
        losses: Of every training batch so far; reading them reads no weights.
        validated: Copies of the weights in every validation step so far.
    """

    def __init__(self, model: str = "mlp", optimizer: str = "sgd") -> None:
        super().__init__()
        self.net: nn.Module = build(model)
        self.model_name = model
        self.optimizer_name = optimizer
        self.losses: list[Tensor] = []
        self.validated: list[list[Tensor]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.detach().clone())
        return loss

    def loss(self, batch: list[Tensor]) -> Tensor:
        return loss_of(self.net, batch[0], batch[1].flatten())

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.validated.append(copies(self))
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return optimizer_for(self.optimizer_name, self.net)


def copies(module: nn.Module) -> list[Tensor]:
    """Copies of all parameters, read the way a user would."""
    return [parameter.detach().clone() for parameter in module.parameters()]


def data(model: str = "mlp", num_samples: int = 24) -> DataLoader[Any]:
    """The same shuffled samples on every rank, in batches of `BATCH_SIZE`."""
    pieces = [batch(model, step, 0) for step in range(num_samples)]
    inputs = torch.cat([inputs[:1] for inputs, _ in pieces])
    targets = torch.stack([targets[: len(targets) // len(inputs)] for inputs, targets in pieces])
    return DataLoader(TensorDataset(inputs, targets), batch_size=BATCH_SIZE, shuffle=True)
