"""LightningModules that train, shard and evaluate a network."""

import math
from abc import abstractmethod
from typing import Any, ClassVar

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F
from torchmetrics import MeanMetric

from lightning_dear.workloads.schedules import OptimizerFactory, SchedulerFactory


class Task(LightningModule):
    """A network with an optimizer and, optionally, a schedule.

    A subclass defines the loss, and what an evaluation logs.

    Args:
        net: Network to train.
        optimizer: Builds the optimizer from an iterable of parameters.
        scheduler: Builds a schedule from the optimizer and ``total_steps``. None means a constant
            learning rate.
    """

    shard_options: ClassVar[dict[str, Any]] = {}

    def __init__(
        self, net: nn.Module, optimizer: OptimizerFactory, scheduler: SchedulerFactory | None = None
    ) -> None:
        super().__init__()
        self.net = net
        self.metrics = nn.ModuleDict({"val": MeanMetric(), "test": MeanMetric()})
        # Not saved as hyper-parameters: factories are functions, and the checkpoint could not be
        # loaded with `weights_only=True`. The job's config.yaml records them.
        self._optimizer_factory = optimizer
        self._scheduler_factory = scheduler

    @abstractmethod
    def loss(self, batch: Any) -> Tensor:
        """Return the mean loss of one batch."""

    @abstractmethod
    def evaluate(self, batch: Any, stage: str) -> None:
        """Evaluate one batch and log its metrics; ``stage`` is ``val`` or ``test``."""

    def log_mean(self, stage: str, name: str, values: Tensor, weight: int = 1) -> None:
        """Add values of one batch to the metric ``STAGE_NAME``, a mean over all batches and ranks.

        Args:
            stage: ``val`` or ``test``.
            name: Name of the metric without the stage; each stage has one such metric.
            values: Values to add, of any shape.
            weight: Weight of each value in the mean.
        """
        metric: Any = self.metrics[stage]
        metric(values, weight)
        self.log(f"{stage}_{name}", metric, prog_bar=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of one batch and log it."""
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Evaluate one batch in validation."""
        self.evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Evaluate one batch in the test."""
        self.evaluate(batch, "test")

    def units(self) -> list[Any]:
        """Return the units of FSDP2: the members of each list or sequence of modules in ``net``."""
        kinds = nn.ModuleList | nn.Sequential
        containers = [child for child in self.net.children() if isinstance(child, kinds)]
        return [block for blocks in containers for block in blocks if list(block.parameters())]

    def configure_model(self) -> None:
        """Shard ``net`` over the data-parallel axis if the strategy has a device mesh.

        Mutates ``net`` in place. A second call, which Lightning makes for validation and test, does
        nothing.
        """
        if self.device_mesh is not None and not isinstance(self.net, FSDPModule):
            for unit in [*self.units(), self.net]:
                fully_shard(unit, mesh=self.device_mesh["data_parallel"], **self.shard_options)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Build the optimizer of all trainable parameters, and its schedule if there is one."""
        optimizer = self._optimizer_factory([p for p in self.parameters() if p.requires_grad])
        if self._scheduler_factory is None:
            return optimizer
        if math.isinf(total_steps := self.trainer.estimated_stepping_batches):
            raise ValueError(
                "The run has no end, and a schedule needs its length. Set trainer.max_steps or"
                " trainer.max_epochs, or choose scheduler=none."
            )
        scheduler = self._scheduler_factory(optimizer, total_steps=int(total_steps))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what ``net`` returns."""
        return self.net(*args, **kwargs)


class Classifier(Task):
    """Cross-entropy training of ``net``; logs train_loss, val_loss, val_acc and test_acc.

    Args:
        net: Maps a batch of inputs to logits of shape (batch, classes).
        optimizer: Same as the argument of `Task`.
        scheduler: Same as the argument of `Task`.
        label_smoothing: Share of the target spread over all classes, in [0, 1).
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(net, optimizer, scheduler)
        self.save_hyperparameters("label_smoothing")
        self.label_smoothing = label_smoothing

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the smoothed cross-entropy of images and labels."""
        inputs, labels = batch
        return F.cross_entropy(self.net(inputs), labels, label_smoothing=self.label_smoothing)

    def evaluate(self, batch: tuple[Tensor, Tensor], stage: str) -> None:
        """Log the accuracy, and in validation the cross-entropy without smoothing."""
        inputs, labels = batch
        logits = self.net(inputs)
        if stage == "val":
            self.log("val_loss", F.cross_entropy(logits, labels), sync_dist=True)
        self.log_mean(stage, "acc", (logits.argmax(dim=1) == labels).float())


class LanguageModel(Task):
    """Trains ``net``, which maps bytes (batch, time) to logits (batch, time, 256), on byte windows.

    Logs train_loss in nats per byte, val_bits_per_byte and test_bits_per_byte.
    """

    def loss(self, windows: Tensor) -> Tensor:
        """Return the mean loss, in nats per byte, of windows of shape (batch, time + 1)."""
        text = windows.long()
        logits: Tensor = self.net(text[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())

    def evaluate(self, windows: Tensor, stage: str) -> None:
        """Log bits per byte."""
        self.log_mean(stage, "bits_per_byte", self.loss(windows) / math.log(2), weight=len(windows))
