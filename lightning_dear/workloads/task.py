"""What every LightningModule here shares: optimizer, schedule, and sharding under FSDP2."""

import math
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_dear.workloads.schedules import OptimizerFactory, SchedulerFactory


class Task(LightningModule):
    """A network with an optimizer and, optionally, a schedule; subclasses add the steps.

    Args:
        net: The network to train.
        optimizer: Builds the optimizer from an iterable of parameters.
        scheduler: Builds a schedule from the optimizer and ``total_steps``; None keeps the
            learning rate constant.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None = None,
    ) -> None:
        super().__init__()
        self.net = net
        # Factories are functions: as hyper-parameters they would make the checkpoint unloadable
        # with `weights_only=True`. The resolved config beside the checkpoint records them.
        self._optimizer_factory = optimizer
        self._scheduler_factory = scheduler

    def configure_model(self) -> None:
        """Shard ``net`` over the data-parallel axis where the strategy provides a device mesh.

        Mutates ``net`` in place, once: Lightning calls this again for validation and test.
        """
        if self.device_mesh is None or isinstance(self.net, FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        for block in _blocks(self.net):
            fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Build the optimizer over all trainable parameters, and the schedule stepped with it."""
        optimizer = self._optimizer_factory([p for p in self.parameters() if p.requires_grad])
        if self._scheduler_factory is None:
            return optimizer
        total_steps = self.trainer.estimated_stepping_batches
        if math.isinf(total_steps):
            raise ValueError(
                "A schedule needs the length of the run: set trainer.max_steps or "
                "trainer.max_epochs, or choose scheduler=none."
            )
        scheduler = self._scheduler_factory(optimizer, total_steps=int(total_steps))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what ``net`` returns."""
        return self.net(*args, **kwargs)


def _blocks(net: nn.Module) -> list[nn.Module]:
    """Return the repeated parts of ``net``: the members of its module lists and sequences."""
    containers = [m for m in net.children() if isinstance(m, nn.ModuleList | nn.Sequential)]
    return [block for container in containers for block in container if _has_parameters(block)]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
