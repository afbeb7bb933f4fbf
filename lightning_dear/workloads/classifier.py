"""Classification with any network."""

from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Accuracy

from lightning_dear.workloads.schedules import OptimizerFactory, SchedulerFactory
from lightning_dear.workloads.task import Task


class Classifier(Task):
    """Cross-entropy training of ``net``; logs train_loss, val_loss, val_acc and test_acc.

    Args:
        net: Maps a batch of inputs to logits of shape (batch, ``num_classes``).
        optimizer: Builds the optimizer from an iterable of parameters.
        scheduler: Builds a schedule from the optimizer and ``total_steps``, or None.
        num_classes: Number of classes.
        label_smoothing: Share of the target spread over all classes, in [0, 1).
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None = None,
        num_classes: int = 10,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(net, optimizer, scheduler)
        if num_classes < 2:
            raise ValueError(f"num_classes must be at least 2, got {num_classes}.")
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"label_smoothing must be in [0, 1), got {label_smoothing}.")
        self.save_hyperparameters("num_classes", "label_smoothing")
        self.label_smoothing = label_smoothing
        self.val_acc = Accuracy(task="multiclass", num_classes=num_classes)
        self.test_acc = Accuracy(task="multiclass", num_classes=num_classes)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of one batch and log it."""
        inputs, labels = batch
        loss = F.cross_entropy(self.net(inputs), labels, label_smoothing=self.label_smoothing)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Add one batch to val_loss and val_acc."""
        inputs, labels = batch
        logits = self.net(inputs)
        self.val_acc(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels), sync_dist=True)
        self.log("val_acc", self.val_acc, prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Add one batch to test_acc."""
        inputs, labels = batch
        self.test_acc(self.net(inputs), labels)
        self.log("test_acc", self.test_acc)
