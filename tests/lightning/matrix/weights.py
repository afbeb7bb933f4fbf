"""Rows: whoever reads weights between two steps, and whoever writes them."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor, nn

from tests.lightning.matrix.averaging import FEATURES as AVERAGING
from tests.lightning.matrix.nets import RowNet, gpt, mlp
from tests.lightning.matrix.rows import Feature, fit_and_validate
from tests.lightning.nets import copies

row = partial(Feature, section="Reading and writing weights")


class _Reader(Callback):
    """Reads weights in one way at the end of every batch, and notes them."""

    def __init__(self, way: str) -> None:
        self.way = way
        self.held: list[nn.Parameter] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.held = list(pl_module.parameters())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self.way != "rank 0" or trainer.is_global_zero:
            pl_module.note(self.way, self.read(pl_module))

    def read(self, module: Any) -> list[Tensor]:
        """The weights."""
        if self.way == "held":
            return [parameter.detach() for parameter in self.held]
        if self.way == "state_dict":
            return list(module.state_dict().values())
        if self.way == "save":
            file = io.BytesIO()
            torch.save(module.net.state_dict(), file)
            return list(torch.load(io.BytesIO(file.getvalue()), weights_only=True).values())
        if self.way == "pickle":
            return copies(pickle.loads(pickle.dumps(module.net)))
        if self.way == "deepcopy":
            return copies(copy.deepcopy(module.net))
        return copies(module)


class _SavesModule(_Reader):
    """`torch.save` of the module object itself."""

    def read(self, module: Any) -> list[Tensor]:
        file = io.BytesIO()
        torch.save(module.net, file)
        return copies(torch.load(io.BytesIO(file.getvalue()), weights_only=False))


class _BatchStartReader(_Reader):
    on_train_batch_end = Callback.on_train_batch_end
    on_train_batch_start = _Reader.on_train_batch_end


def _reader(way: str, kind: type[_Reader] = _Reader) -> Any:
    return partial(_new_reader, way, kind)


def _new_reader(way: str, kind: type[_Reader], folder: Path) -> Sequence[Callback]:
    return [kind(way)]


class _OwnHook(RowNet):
    """Reads its weights in a hook of its own, through a list that it made before."""

    def on_fit_start(self) -> None:
        self.held = list(self.parameters())

    def read(self, *_: Any) -> None:
        self.note("own hook", [parameter.detach() for parameter in self.held])


class _OwnEndHook(_OwnHook):
    on_train_batch_end = _OwnHook.read


class _OwnStartHook(_OwnHook):
    on_train_batch_start = _OwnHook.read


class _OwnValidation(_OwnHook):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.read()


class _OwnStep(_OwnHook):
    """Clamps the weights in the optimizer's groups right after the step."""

    def change(self, optimizer: Any) -> None:
        self.read()
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.clamp_(-0.2, 0.2)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.change(self.trainer.optimizers[0])


class _OwnSchedule(_OwnStep):
    optimizer_step = RowNet.optimizer_step

    def configure_optimizers(self) -> Any:
        optimizer = self.new_optimizer(self)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.change(scheduler.optimizer)
        super().lr_scheduler_step(scheduler, metric)


class _Writer(Callback):
    """Changes weights between steps."""

    def __init__(self, way: str) -> None:
        self.way = way

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        parameter = next(iter(pl_module.parameters()))
        with torch.no_grad():
            if self.way == "in place":
                parameter.mul_(0.5)
            elif self.way == "data":
                parameter.data = parameter.data * 0.5
            else:
                state = {key: value * 0.5 for key, value in pl_module.state_dict().items()}
                pl_module.load_state_dict(state)


def _writer(way: str) -> Any:
    return partial(_new_writer, way)


def _new_writer(way: str, folder: Path) -> Sequence[Callback]:
    return [_Writer(way)]


def _checkpoint(folder: Path) -> Sequence[Callback]:
    return [ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)]


def _fit_and_load(trainer: Trainer, module: LightningModule, loader: Any) -> None:
    """Notes the weights and the optimizer's state in every file."""
    trainer.fit(module, loader)
    dist.barrier()
    folder = Path(trainer.checkpoint_callback.dirpath)
    files = sorted(folder.iterdir())
    assert [file.name for file in files] == ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]
    for file in files:
        saved = torch.load(file, weights_only=True)
        module.note("weights in the file", list(saved["state_dict"].values()))
        (state,) = saved["optimizer_states"]
        tensors = [one for _, entries in sorted(state["state"].items()) for one in entries.values()]
        module.note("optimizer state in the file", [t for t in tensors if t is not None])


def _async_io() -> Sequence[Any]:
    return [AsyncCheckpointIO()]


CHECKPOINTED = {"drive": _fit_and_load, "trainer": {"enable_checkpointing": True}}
FEATURES = (
    row(name="a callback that reads weights", net=gpt, data="gpt", callbacks=_reader("callback")),
    row(
        name="a callback that reads weights in on_train_batch_start",
        net=mlp,
        callbacks=_reader("start", _BatchStartReader),
    ),
    row(
        name="a callback with a list of parameters kept since on_fit_start",
        net=mlp,
        callbacks=_reader("held"),
    ),
    row(name="a held list read in the module's own on_train_batch_end", net=_OwnEndHook),
    row(name="a held list read in the module's own on_train_batch_start", net=_OwnStartHook),
    row(
        name="a held list read in validation_step",
        net=_OwnValidation,
        drive=fit_and_validate,
        trainer={"val_check_interval": 2, "limit_val_batches": 1},
    ),
    row(name="reads on rank 0 alone", net=mlp, callbacks=_reader("rank 0")),
    row(name="state_dict() between steps", net=gpt, data="gpt", callbacks=_reader("state_dict")),
    row(name="torch.save of a state_dict", net=mlp, callbacks=_reader("save")),
    row(name="torch.save of the module", net=mlp, callbacks=_reader("save", _SavesModule)),
    row(name="copy.deepcopy of the module", net=mlp, callbacks=_reader("deepcopy")),
    row(name="pickle of the module", net=mlp, callbacks=_reader("pickle")),
    row(name="weights changed in place", net=mlp, callbacks=_writer("in place")),
    row(name="weights clamped in the module's own optimizer_step", net=_OwnStep),
    row(name="weights clamped in the module's own lr_scheduler_step", net=_OwnSchedule),
    row(name="weights replaced through .data", net=mlp, callbacks=_writer("data")),
    row(name="load_state_dict between steps", net=mlp, callbacks=_writer("load")),
    row(
        name="ModelCheckpoint every n steps",
        net=gpt,
        data="gpt",
        callbacks=_checkpoint,
        **CHECKPOINTED,
    ),
    row(
        name="asynchronous checkpoints (AsyncCheckpointIO)",
        net=mlp,
        callbacks=_checkpoint,
        plugins=_async_io,
        **CHECKPOINTED,
    ),
    *AVERAGING,
)
