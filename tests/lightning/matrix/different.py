"""What is not as under DDP, by design, and shown to be so."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from tests.lightning.fitting import assert_same, dear, fit
from tests.lightning.matrix import local_steps
from tests.lightning.matrix.rows import Different
from tests.lightning.nets import Net, copies


class _Keeping(Net):
    """Never clears its gradients."""

    def optimizer_zero_grad(self, *_: Any) -> None:
        """Does nothing."""


def _keep() -> None:
    with warnings.catch_warnings(record=True) as seen:
        fit(dear(), _Keeping("mlp"))
    said = " ".join(str(one.message) for one in seen)
    assert ("zero_grad() was not called since its last step" in said) == (dist.get_rank() == 0)


class _Looking(Callback):
    """Looks at what a step leaves behind."""

    num_steps = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        (optimizer,) = trainer.optimizers
        assert all(parameter.grad is None for parameter in pl_module.parameters())
        with pytest.raises(RuntimeError, match="was read between steps"):
            len(optimizer.state)
        state = trainer.strategy.optimizer_state(optimizer, on_all_ranks=True)["state"]
        assert len(state) == len(list(pl_module.parameters()))
        self.num_steps += 1


def _look() -> None:
    looking = _Looking()
    fit(dear(), Net("mlp", "adamw"), looking)
    assert looking.num_steps == 6


class _Loading(Callback):
    """Loads halved weights between steps, in place or by assignment."""

    def __init__(self, assign: bool) -> None:
        self.assign = assign

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        state = {key: value * 0.5 for key, value in pl_module.state_dict().items()}
        pl_module.load_state_dict(state, assign=self.assign)


def _assign() -> None:
    nets = {assign: Net("mlp") for assign in (False, True)}
    for assign, net in nets.items():
        fit(dear(), net, _Loading(assign))
    assert_same(nets[True].losses, nets[False].losses, "loss")
    assert_same(copies(nets[True]), copies(nets[False]), "weights after fit")


def _fit_without() -> None:
    class Reader(Net):
        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            assert all(parameter.grad is None for parameter in self.parameters())

    fit(dear(gradients_in_hooks=False), Reader("mlp"))


class _Saves(Callback):
    num_bytes = 0

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        small = min(pl_module.parameters(), key=torch.numel)
        for one in (small, small.detach().clone()):
            torch.save(one, file := io.BytesIO())
            sizes = self.num_bytes, file.tell()
            self.num_bytes = file.tell()
        assert sizes[0] > 2 * sizes[1]


def _save_a_part() -> None:
    fit(dear(), Net("mlp"), saves := _Saves())
    assert saves.num_bytes


class _Clips(Net):
    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        assert len(self.losses) == 1 or all(one.grad is None for one in self.parameters())


def _override_backward() -> None:
    with warnings.catch_warnings(record=True) as seen:
        fit(dear(), _Clips("mlp"))
    said = " ".join(str(one.message) for one in seen)
    assert ("_Clips overrides backward" in said) == (dist.get_rank() == 0)


DIFFERENT = (
    Different(
        "gradients kept over a step (no zero_grad)",
        _keep,
        "the step forgets them, with a warning; DDP adds the next ones to them",
        "accumulate before the step",
    ),
    Different(
        ".grad and optimizer.state between a step and the next backward",
        _look,
        "`.grad` is None and to read `optimizer.state` raises",
        "hooks for gradients; `with strategy.on_shards(optimizer):`",
    ),
    Different(
        "gradients_in_hooks=False",
        _fit_without,
        "`.grad` is None in hooks between backward and step",
        "leave the option out where a hook needs `.grad`",
    ),
    Different(
        "a module's own backward that reads or clips .grad",
        _override_backward,
        "a warning: `.grad` is None there",
        "on_after_backward or configure_gradient_clipping",
    ),
    Different(
        "torch.save of a part of the weights in mid-fit",
        _save_a_part,
        "the file is as large as whole buckets",
        "clone the tensors first",
    ),
    Different(
        "load_state_dict(assign=True) in mid-training",
        _assign,
        "the assigned weights are trained; under DDP the old ones are",
        "nothing has to be done",
    ),
    *local_steps.DIFFERENT,
)
