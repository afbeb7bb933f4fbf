"""Next-byte prediction, measured in bits per byte."""

import math

from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric

from lightning_dear.workloads.schedules import OptimizerFactory, SchedulerFactory
from lightning_dear.workloads.task import Task


class LanguageModel(Task):
    """Trains ``net`` on windows of bytes.

    Logs train_loss in nats per byte, val_bits_per_byte and test_bits_per_byte.

    Args:
        net: Maps bytes (batch, time) to logits (batch, time, 256).
        optimizer: Builds the optimizer from an iterable of parameters.
        scheduler: Builds a schedule from the optimizer and ``total_steps``, or None.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None = None,
    ) -> None:
        super().__init__(net, optimizer, scheduler)
        self.val_bits_per_byte = MeanMetric()
        self.test_bits_per_byte = MeanMetric()

    def training_step(self, windows: Tensor, batch_idx: int) -> Tensor:
        """Return the loss of one batch of windows and log it."""
        loss = self._loss(windows)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, windows: Tensor, batch_idx: int) -> None:
        """Add one batch to val_bits_per_byte."""
        self.val_bits_per_byte(self._loss(windows) / math.log(2), weight=len(windows))
        self.log("val_bits_per_byte", self.val_bits_per_byte, prog_bar=True)

    def test_step(self, windows: Tensor, batch_idx: int) -> None:
        """Add one batch to test_bits_per_byte."""
        self.test_bits_per_byte(self._loss(windows) / math.log(2), weight=len(windows))
        self.log("test_bits_per_byte", self.test_bits_per_byte)

    def _loss(self, windows: Tensor) -> Tensor:
        text = windows.long()
        logits: Tensor = self.net(text[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
