"""The LightningModule that the rows vary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.lightning.nets import Net
from tests.training.models import optimizer_for


class RowNet(Net):
    """A small model under one optimizer over all of the module's parameters.

    Args:
        optimizer: "sgd" or "adamw".
        model: Name of one of the engine tests' models, or what builds another.

    Attributes:
        noted: What the module noted, by name; compared like everything else.
    """

    def __init__(self, optimizer: str, model: str | Callable[[], nn.Module] = "mlp") -> None:
        super().__init__(model if isinstance(model, str) else "mlp", optimizer)
        if not isinstance(model, str):
            torch.manual_seed(1)
            self.net = model()
        self.noted: dict[str, list[list[Tensor]]] = {}

    def note(self, name: str, tensors: Sequence[Any]) -> None:
        """Keeps copies of `tensors` as the next entry of series `name`."""
        kept = [torch.as_tensor(tensor).detach().clone() for tensor in tensors]
        self.noted.setdefault(name, []).append(kept)

    def new_optimizer(self, module: nn.Module) -> Optimizer:
        """The row's optimizer over `module`'s parameters."""
        return optimizer_for(self.optimizer_name, module)

    def configure_optimizers(self) -> Any:
        return self.new_optimizer(self)


class ManualNet(RowNet):
    """The same, with manual optimisation."""

    def __init__(self, optimizer: str, model: str | Callable[[], nn.Module] = "mlp") -> None:
        super().__init__(optimizer, model)
        self.automatic_optimization = False

    def backward_of(self, batch: Any, scale: float = 1.0) -> Tensor:
        """One forward and one backward; the loss is kept, and returned without its graph."""
        loss = self.loss(batch)
        self.losses.append(loss.detach().clone())
        self.manual_backward(loss * scale)
        return loss.detach()


def mlp(optimizer: str) -> RowNet:
    """The plainest module."""
    return RowNet(optimizer)


def conv(optimizer: str) -> RowNet:
    """With BatchNorm."""
    return RowNet(optimizer, "conv")


def gpt(optimizer: str) -> RowNet:
    """A transformer whose output layer shares the embedding's weight."""
    return RowNet(optimizer, "gpt")
