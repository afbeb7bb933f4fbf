"""Rows: manual optimisation, closures, several optimizers and learning rate schedulers."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn

from lightning_dear import DearStrategy
from tests.lightning.fitting import assert_same
from tests.lightning.matrix.manual import FEATURES as MANUAL
from tests.lightning.matrix.nets import RowNet
from tests.lightning.matrix.rows import Feature, fit_and_validate
from tests.lightning.matrix.seen import Seen
from tests.lightning.matrix.unheld import FEATURES as UNHELD
from tests.lightning.nets import copies

ON_SHARDS = "call it in `with strategy.on_shards():`"
row = partial(Feature, section="Optimisation")


class _Closure(RowNet):
    """Calls the optimizer itself, and notes what `step` returned."""

    num_calls = 1

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        for _ in range(self.num_calls - 1):
            optimizer_closure()
        self.note("returned", [optimizer.step(optimizer_closure)])


class _ClosureTwice(_Closure):
    """The closure's first gradients are cleared by its second call."""

    num_calls = 2


class _WritingState(RowNet):
    """Resets the optimizer's state after a batch, or replaces one parameter's."""

    def on_train_batch_end(self, *_: Any) -> None:
        optimizer = self.trainer.optimizers[0]
        parameters = optimizer.param_groups[0]["params"]
        number = self.trainer.global_step
        if number == 2:
            optimizer.state.clear()
        elif number == 4:
            first, second, *_ = parameters
            optimizer.state.pop(second, None)
            moment = torch.full_like(first, 1e-4)
            steps = {"step": torch.tensor(2.0)}
            optimizer.state[first] = {**steps, "exp_avg": moment, "exp_avg_sq": moment.square()}


class _SecondMoment(torch.optim.Optimizer):
    """Divides by a second moment, which a method of its own updates."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    def _moment(self, parameter: Tensor) -> Tensor:
        return self.state[parameter].setdefault("moment", torch.ones_like(parameter))

    @torch.no_grad()
    def update_moment(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            self._moment(parameter).lerp_(parameter.grad.square(), 0.5)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    scaled = parameter.grad / (self._moment(parameter).sqrt() + 0.1)
                    parameter.sub_(scaled, alpha=group["lr"])
        return loss


class _SecondMethod(RowNet):
    """Calls the optimizer's own method between backward and step."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return _SecondMoment(self.parameters())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy = self.trainer.strategy
        ours = strategy.on_shards if isinstance(strategy, DearStrategy) else nullcontext
        with ours():
            optimizer.update_moment()


class _Skipping(RowNet):
    """Runs the closure in every batch, but steps in every second one only."""

    phase = 1

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer_closure()
        if batch_idx % 2 == self.phase:
            optimizer.step()


class _SkippingLater(_Skipping):
    """The first step, which is recorded, is one with a closure."""

    phase = 0


class _Scheduled(RowNet):
    """With a learning rate scheduler."""

    def __init__(self, optimizer: str, kind: str, interval: str) -> None:
        super().__init__(optimizer)
        self.kind, self.interval = kind, interval

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedulers = torch.optim.lr_scheduler
        if self.kind == "one cycle":
            schedule: Any = schedulers.OneCycleLR(optimizer, max_lr=0.05, total_steps=13)
        elif self.kind == "plateau":
            schedule = schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        else:
            schedule = schedulers.ExponentialLR(optimizer, 0.5)
        config = {"scheduler": schedule, "interval": self.interval, "monitor": "val_loss"}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.note("monitored", [self.trainer.callback_metrics.get("val_loss", torch.zeros(()))])


def _rates_change(seen: Seen) -> None:
    first, *_, last = seen.series["rates"]
    assert not torch.equal(first[0], last[0])


def _lr_find(trainer: Trainer, module: LightningModule, loader: Any) -> None:
    before = [one.to(trainer.precision_plugin.convert_input(one).dtype) for one in copies(module)]
    finder = Tuner(trainer).lr_find(
        module, loader, num_training=5, update_attr=False, early_stop_threshold=None
    )
    assert finder is not None
    assert_same(copies(module), before, "weights after the search")
    module.note("loss by rate", [torch.tensor(finder.results["loss"])])
    trainer.fit(module, loader)


class _Rate(RowNet):
    """With the attribute that `lr_find` looks for."""

    lr = 0.01

    def new_optimizer(self, module: nn.Module) -> Any:
        optimizer = super().new_optimizer(module)
        for group in optimizer.param_groups:
            group["lr"] = self.lr
        return optimizer


class _ReadingRate(_Rate):
    """Reads gradients in a hook, in the search, too."""

    def on_after_backward(self) -> None:
        self.note("gradients", [parameter.grad for parameter in self.parameters()])


class _Blocks(RowNet):
    """One layer after the other takes its turn in the optimizer's groups."""

    def configure_optimizers(self) -> Any:
        return self.new_optimizer(self.net.layers[0])

    def on_train_epoch_start(self) -> None:
        weight, bias = self.net.layers[2 * (self.current_epoch % 2)].parameters()
        matrices, vectors = self.trainer.optimizers[0].param_groups
        matrices["params"], vectors["params"] = [weight], [bias]


def _every_epoch_trains(seen: Seen) -> None:
    weights = seen.series["weights"]
    for before, after in pairwise(weights[1::2]):
        assert not all(map(torch.equal, before, after))


FEATURES = (
    *MANUAL,
    *UNHELD,
    row(
        name="other parameters put into an optimizer's groups",
        net=_Blocks,
        trainer={"max_epochs": 3},
        num_batches=2,
        check=_every_epoch_trains,
        remark="on all ranks, between a step and the next forward",
    ),
    row(name="optimizer_step with a closure", net=_Closure, num_steps=6),
    row(name="a closure called twice", net=_ClosureTwice, num_steps=6),
    row(name="a step apart from its closure", net=_Skipping),
    row(name="a step apart from its closure, later", net=_SkippingLater),
    row(
        name="learning rate scheduler on steps",
        net=partial(_Scheduled, kind="exponential", interval="step"),
        check=_rates_change,
    ),
    row(
        name="learning rate scheduler on epochs",
        net=partial(_Scheduled, kind="exponential", interval="epoch"),
        trainer={"max_epochs": 2},
        num_batches=3,
        check=_rates_change,
    ),
    row(
        name="OneCycleLR, which changes momentum too",
        net=partial(_Scheduled, kind="one cycle", interval="step"),
        check=_rates_change,
    ),
    row(
        name="ReduceLROnPlateau",
        net=partial(_Scheduled, kind="plateau", interval="epoch"),
        drive=fit_and_validate,
        trainer={"max_epochs": 4},
        num_batches=2,
    ),
    row(name="lr_find, then fit", net=_Rate, drive=_lr_find),
    row(name="lr_find of a module that reads gradients", net=_ReadingRate, drive=_lr_find),
    row(
        name="optimizer state reset or written between steps",
        net=_WritingState,
        optimizers=("adamw",),
    ),
    row(
        name="a method of the optimizer that uses gradients and state",
        net=_SecondMethod,
        optimizers=("sgd",),
        remark=ON_SHARDS,
    ),
)
