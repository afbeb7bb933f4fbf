"""Rows: how parameters are owned, read, shared and frozen."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

from tests.lightning.matrix import models
from tests.lightning.matrix.nets import RowNet, conv, gpt, mlp
from tests.lightning.matrix.rows import NUM_BATCHES, SEVERAL, Feature, fit_and_validate
from tests.lightning.matrix.seen import Seen
from tests.lightning.matrix.unused import FEATURES as UNUSED
from tests.training import odd_models
from tests.training.models import batch as batch_of

row = partial(Feature, section="Parameters")


def _odd(name: str) -> partial[RowNet]:
    return partial(RowNet, model=odd_models.ODD_MODELS[name])


def _net(model: type[nn.Module]) -> partial[RowNet]:
    return partial(RowNet, model=model)


class _Owner(RowNet):
    """Owns parameters itself, and reads one of them before and one behind all layers."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.scale = nn.Parameter(torch.ones(7))
        self.temperature = nn.Parameter(torch.ones(1))

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss([batch[0] * self.scale, batch[1]]) * self.temperature.square()


class _Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 90), nn.Tanh(), nn.Linear(90, 50), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class _Finetuned(RowNet):
    """A backbone that joins in the second epoch; takes its samples by step and rank.

    In one process it takes those of all ranks, and the mean of their losses.
    """

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer, lambda: nn.Linear(50, 3))
        self.backbone = _Backbone()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        own, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        is_single = isinstance(self.trainer.strategy, SingleDeviceStrategy)
        losses = {}
        for rank in range(world_size) if is_single else [own]:
            inputs, targets = batch_of("mlp", self.trainer.global_step, rank)
            hidden = self.backbone(inputs.to(self.backbone.layers[0].weight))
            losses[rank] = self.loss([hidden, targets])
        self.losses.append(losses[own].detach().clone())
        return sum(losses.values()) / len(losses)

    def configure_optimizers(self) -> Any:
        trained = nn.ParameterList(p for p in self.parameters() if p.requires_grad)
        return self.new_optimizer(trained)


def _finetuning(folder: Path) -> Sequence[Callback]:
    return [BackboneFinetuning(1, lambda epoch: 2.0, backbone_initial_lr=0.01)]


def _joined(seen: Seen) -> None:
    """The backbone rests in the first epoch and trains in the second."""
    backbone = [step[2:] for step in seen.series["weights"]]
    assert all(map(torch.equal, backbone[0], backbone[2]))
    assert not any(map(torch.equal, backbone[2], backbone[-1]))


class _Freezer(Callback):
    """Freezes the first layer in the second epoch, and thaws it in the third."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net.layers[0].requires_grad_(trainer.current_epoch != 1)


def _freezing(folder: Path) -> Sequence[Callback]:
    return [_Freezer()]


def _rested(seen: Seen) -> None:
    """The first layer trains in the first and third epoch."""
    (first, before, after, last) = (seen.series["weights"][step][0] for step in (0, 1, 3, 5))
    assert torch.equal(before, after)
    assert not torch.equal(first, before)
    assert not torch.equal(after, last)


class _SyncedNorm(nn.BatchNorm1d):
    """Normalises over all ranks' samples, on CPU, which torch's SyncBatchNorm does not."""

    def forward(self, x: Tensor) -> Tensor:
        sums = torch.stack([x.mean(0), x.square().mean(0)])
        mean, square = all_reduce(sums) / dist.get_world_size()
        normed = (x - mean) / (square - mean.square() + self.eps).sqrt()
        self.running_mean.lerp_(mean.detach(), 0.1)
        return normed * self.weight + self.bias


class _CpuSync(LayerSync):
    """What `sync_batchnorm=True` puts in place, for CPU."""

    def apply(self, model: nn.Module) -> nn.Module:
        model.net.norm.__class__ = _SyncedNorm
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        assert type(model.net.norm) is _SyncedNorm
        model.net.norm.__class__ = nn.BatchNorm1d
        return model


def _layer_sync() -> Sequence[Any]:
    return [_CpuSync()]


class _Weighted(RowNet):
    """Weighs its inputs by a buffer, which ranks write between steps: all of them, or one alone."""

    writers: Sequence[int] = range(8)

    def __init__(self, optimizer: str, **options: Any) -> None:
        super().__init__(optimizer, **options)
        self.register_buffer("scales", torch.ones(7))

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss([batch[0] * self.scales, batch[1]])

    def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
        if int(os.environ["RANK"]) in self.writers:
            self.scales.mul_(0.5).add_(batch[0].abs().mean(0))


class _WeightedByRank0(_Weighted):
    writers = (0,)


class _WeightedByRank1(_Weighted):
    """Rank 0's values, which do not change, count."""

    writers = (1,)


class _Reweighted(RowNet):
    """Puts another buffer in its place once in an epoch, and has BatchNorm beside it."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer, "conv")
        self.register_buffer("scale", torch.ones(()))

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss([batch[0] * self.scale, batch[1]])

    def on_train_epoch_start(self) -> None:
        self.scale = self.scale * (0.5 + 0.1 * int(os.environ["RANK"]))


class _Shared(RowNet):
    """Lies in shared memory, of which tensors elsewhere are read when an epoch ends."""

    def __init__(self, optimizer: str, **options: Any) -> None:
        super().__init__(optimizer, **options)
        self.net.share_memory()
        self.kept = [one.detach() for one in self.net.parameters()]

    def on_train_epoch_end(self) -> None:
        self.note("shared", self.kept)

    def on_fit_end(self) -> None:
        self.note("shared after fit", self.kept)


class _Evaluated(RowNet):
    """Notes what its running statistics give in validation."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.note("evaluated", [self.loss(batch)])


class _Exchanged(RowNet):
    """Modules are exchanged for others with the same parameters, the recurrent one twice."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer, lambda: nn.Linear(40, 3))
        self.first = nn.Linear(7, 7)
        self.gru = nn.GRU(7, 40, batch_first=True)

    def loss(self, batch: list[Tensor]) -> Tensor:
        hidden = self.gru(torch.tanh(self.first(batch[0])).unsqueeze(1))[0][:, -1]
        return super().loss([hidden, batch[1]])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx in (2, 4):
            old, self.gru = self.gru, nn.GRU(7, 40, batch_first=True).to(self.gru.weight_ih_l0)
            for name, parameter in old.named_parameters():
                setattr(self.gru, name, parameter)
        if batch_idx == 2:
            self.first = models.HoldsAnothers(self.first)
        if batch_idx == 4:
            self.net = torch.jit.script(models.HoldsAnothers(self.net))


FEATURES = (
    *UNUSED,
    row(name="tied weights", net=gpt, data="gpt"),
    row(name="tied weights, read through the alias first", net=_odd("tied_alias_first")),
    row(name="frozen parameters", net=_net(models.Frozen)),
    row(
        name="parameters frozen and thawed in mid-training",
        net=mlp,
        callbacks=_freezing,
        trainer={"max_epochs": 3},
        num_batches=2,
        reference="ddp, unused",
        check=_rested,
    ),
    row(
        name="BackboneFinetuning",
        net=_Finetuned,
        callbacks=_finetuning,
        trainer={"max_epochs": 2},
        num_batches=3,
        reference="single",
        check=_joined,
        remark="compared with one process: DDP does not average parameters that join later",
    ),
    row(name="parameters of the LightningModule itself", net=_Owner),
    row(name="functional use (F.linear with a layer's weight)", net=_odd("functional")),
    row(name="torch.func.functional_call", net=_net(models.FunctionalCall)),
    row(
        name="parts in TorchScript",
        net=_net(models.InTorchScript),
        remark="their parameters arrive at the end of the step; the rest overlaps",
    ),
    row(name="parametrizations (weight_norm, orthogonal)", net=_net(models.Parametrized)),
    row(
        name="modules exchanged in mid-training for others with the same parameters",
        net=_Exchanged,
        remark="the next forward waits for all parameters",
    ),
    row(name="a module called several times", net=_odd("called_twice")),
    row(
        name="a layer used twice in some steps",
        net=_net(models.TwiceInSomeSteps),
        reference="ddp, unused",
    ),
    row(name="activation checkpointing", net=_odd("checkpointed")),
    row(name="activation checkpointing, reentrant", net=_net(models.Reentrant)),
    row(name="channels_last", net=_odd("channels_last"), data="conv"),
    row(
        name="BatchNorm buffers",
        net=conv,
        data="conv",
        remark="follow rank 0 at the end of a step, not with the next forward",
    ),
    row(
        name="a buffer written between steps",
        net=_Weighted,
        remark="in manual optimisation, too; DDP leaves each rank its own values there",
    ),
    row(name="a buffer written between steps by rank 0 alone", net=_WeightedByRank0),
    row(
        name="a buffer written between steps by rank 1 alone",
        net=_WeightedByRank1,
        world_sizes=SEVERAL,
    ),
    row(
        name="a buffer written between steps while accumulating",
        net=_Weighted,
        trainer={"accumulate_grad_batches": 2},
        num_steps=NUM_BATCHES // 2,
    ),
    row(
        name="a buffer written between steps, with gathered gradients",
        net=_Weighted,
        strategy={"gather": "gradients"},
    ),
    row(
        name="a buffer replaced between epochs",
        net=_Reweighted,
        data="conv",
        trainer={"max_epochs": 2},
    ),
    row(
        name="a model in shared memory",
        net=_Shared,
        remark="a process that reads it during a step may see two steps mixed",
    ),
    row(
        name="a model in shared memory, with gathered gradients",
        net=_Shared,
        strategy={"gather": "gradients"},
    ),
    row(
        name="BatchNorm in validation",
        net=partial(_Evaluated, model="conv"),
        data="conv",
        drive=fit_and_validate,
    ),
    row(
        name="SyncBatchNorm",
        net=_net(models.Normed),
        plugins=_layer_sync,
        remark="tested with a stand-in: torch's layer needs a GPU",
    ),
    row(name="modules registered in another order", net=_odd("registered_backwards")),
    row(name="MultiheadAttention", net=_odd("attention")),
    row(name="recurrent layers (GRU)", net=_odd("recurrent")),
    row(name="weights read through a held list", net=_odd("held_list")),
    row(name="a held list read before its owner runs", net=_net(models.HeldAlias)),
    row(name="a no-grad teacher with the student's weights", net=_net(models.NoGradTeacher)),
    row(name="a moving-average teacher in forward", net=_net(models.MovingTeacher)),
    row(name="weights read through .data", net=_net(models.ThroughData)),
    row(name="an embedding read by F.embedding and by index", net=_net(models.Embedded)),
    row(name="a bias read before its layer runs", net=_net(models.BiasFirst)),
    row(name="the first layer's weight used again at the end", net=_net(models.FirstLayerAgain)),
)
