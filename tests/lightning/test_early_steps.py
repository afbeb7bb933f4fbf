"""Early gathers are armed only where nothing but the step uses the gradients."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from tests.distributed.harness import distributed
from tests.lightning.fitting import STRATEGIES, assert_same, dear, fit
from tests.lightning.nets import Net, copies


class _Slow(Net):
    """A backward in which reductions have time to arrive, and what was stepped in it."""

    pause_s = 0.01

    def __init__(self, model: str = "mlp", optimizer: str = "sgd") -> None:
        super().__init__(model, optimizer)
        self.num_early: list[int] = []
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: time.sleep(self.pause_s))


class _Counts(Callback):
    """Counts at the end of the closure, before the step clears them."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pipeline = trainer.strategy._pipeline
        if pipeline is not None:
            part = pipeline.parts[0]
            prepare = part._prepare_step

            def counting() -> Any:
                pl_module.num_early.append(len(part.stepper.stepped_early))
                return prepare()

            part._prepare_step = counting


def _count(net: _Slow, **options: Any) -> int:
    fit(dear(), net, _Counts(), **options)
    assert net.num_early
    return sum(net.num_early)


@distributed(world_sizes=(2,))
def test_buckets_are_stepped_early_and_the_weights_are_ddps() -> None:
    nets = {name: _Slow() for name in STRATEGIES}
    assert _count(nets["dear"]) > 0
    fit(STRATEGIES["ddp"](), nets["ddp"])
    assert_same(nets["dear"].losses, nets["ddp"].losses, "losses")
    assert_same(copies(nets["dear"]), copies(nets["ddp"]), "weights")
    assert _count(_Slow(), accumulate_grad_batches=3) > 0


class _Looks(_Slow):
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.seen = [parameter.grad for parameter in self.parameters()]


class _StepsItself(_Slow):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)


class _BacksItself(_Slow):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)


@distributed(world_sizes=(2,))
def test_nothing_is_stepped_early_where_gradients_are_looked_at() -> None:
    for kind in (_Looks, _StepsItself, _BacksItself):
        assert _count(kind()) == 0, kind
    assert _count(_Slow(), gradient_clip_val=0.5) == 0


class _FailsInBackward(_Slow):
    # A rank that has stepped nothing yet would wait for the other.
    pause_s = 0.1

    def on_before_backward(self, loss: Tensor) -> None:
        if self.trainer.global_step == 2:
            first = next(self.parameters())
            first.register_post_accumulate_grad_hook(_fail)


def _fail(parameter: torch.nn.Parameter) -> None:
    raise ZeroDivisionError


class _SavesAfterwards(Callback):
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        with pytest.raises(RuntimeError, match="no consistent state to save"):
            trainer.save_checkpoint("never")
        pl_module.was_refused = True


@distributed(world_sizes=(2,))
def test_a_checkpoint_of_a_half_stepped_state_is_refused() -> None:
    net = _FailsInBackward()
    with pytest.raises(ZeroDivisionError):
        fit(dear(), net, _Counts(), _SavesAfterwards())
    assert net.was_refused
