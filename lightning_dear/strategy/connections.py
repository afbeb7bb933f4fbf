"""What of Lightning is connected to a fit's pipeline, and let go when it ends.

Its precision plug-ins clip and unscale `.grad`, which is not the mean gradient.

Its handler of SIGTERM broadcasts from within the signal, so that a rank that is told alone waits
for others that never come. From version 2.6 on it also broadcasts before every batch whether rank 0
was told, on the default group, and all ranks wait for it. When a batch starts, the link is full of
all-gathers, and the answer queues behind them: the overlap with forward would be lost. So the wish
of any rank travels with the flags of the reduce-scatters instead (`Signal`, `StopRequest`).
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import wrappers
from lightning.fabric.plugins import Precision as FabricPrecision
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.optim import Optimizer

from lightning_dear import private_names
from lightning_dear.callbacks import CompressionSchedule, FusionTuner, TimelineCallback
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.engine.step import OptimizerPipeline
from lightning_dear.engine.training import Training
from lightning_dear.planning import FusionPlanner, SearchingPlanner
from lightning_dear.strategy.failures import FailureBoard
from lightning_dear.versions import is_inside

log = logging.getLogger(__name__)

_FabricOptimizer = private_names.FABRIC_OPTIMIZER.of(wrappers)
_ASKS = is_inside(pl.__version__, "2.6", "1000")  # type: ignore[attr-defined]


def append_callbacks(
    trainer: pl.Trainer, planner: FusionPlanner, schedule: CompressionSchedule | None
) -> None:
    """Adds the callbacks that work between two steps of a fit, once for a trainer."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if trainer.state.fn != TrainerFn.FITTING:
        return
    has_tuner = any(isinstance(one, FusionTuner) for one in callbacks)
    if isinstance(planner, SearchingPlanner) and not has_tuner:
        callbacks.append(FusionTuner(planner))
    folder = os.environ.get("LIGHTNING_DEAR_TIMELINE")
    recorded = [one.dirpath for one in callbacks if isinstance(one, TimelineCallback)]
    if folder and not recorded:
        callbacks.append(TimelineCallback(dirpath=folder))
    elif folder and folder not in recorded:
        rank_zero_warn("LIGHTNING_DEAR_TIMELINE is ignored: the trainer has a TimelineCallback.")
    if schedule is not None and schedule not in callbacks:
        callbacks.append(schedule)


def connect_precision(precision: Precision, pipeline: Pipeline) -> None:
    """Lets `precision` clip and unscale the shards' gradients, until `disconnect_precision`.

    `clip_gradients`, `configure_gradient_clipping` and `gradient_clip_val` all end in the methods
    replaced here.
    """

    def part_of(optimizer: Optimizer) -> OptimizerPipeline:
        return pipeline.of(unwrapped(optimizer))

    vars(precision).update(
        clip_grad_by_norm=lambda optimizer, by: part_of(optimizer).mean.clip_by_norm(float(by)),
        clip_grad_by_value=lambda optimizer, by: part_of(optimizer).mean.clip_by_value(float(by)),
    )
    connect_scaler(precision, pipeline, part_of)


def connect_scaler(
    precision: FabricPrecision,
    pipeline: Pipeline,
    part_of: Callable[[Optimizer], OptimizerPipeline | None],
) -> None:
    """Lets a GradScaler unscale shards, and `pipeline` ask for what it multiplies losses by.

    Args:
        precision: May have none: then nothing is done.
        pipeline: To be told.
        part_of: What steps an optimizer's shards; None: nothing of ours.
    """
    scaler = getattr(precision, "scaler", None)
    if scaler is None:
        return
    vars(scaler).pop("unscale_", None)
    unscale = scaler.unscale_

    def on_shards(optimizer: Optimizer) -> None:
        part = part_of(optimizer)
        unscale(optimizer) if part is None else part.mean.unscale(unscale)

    scaler.unscale_ = on_shards
    for part in pipeline.parts:
        part.plans.loss_scale = partial(loss_scale, scaler, part.parameters[0].device)


def loss_scale(scaler: Any, device: torch.device) -> Tensor:
    """Returns what a GradScaler multiplies losses by, without waiting for a device."""
    # Its `get_scale` waits for the device.
    scaled: Tensor = scaler.scale(torch.ones(1, dtype=torch.float32, device=device))
    return scaled


def disconnect_precision(precision: Precision) -> None:
    """Undoes `connect_precision`."""
    for name in ("clip_grad_by_norm", "clip_grad_by_value"):
        vars(precision).pop(name, None)
    scaler = getattr(precision, "scaler", None)
    if scaler is not None:
        vars(scaler).pop("unscale_", None)


def unwrapped(optimizer: Any) -> Optimizer:
    """Returns torch's optimizer in what a Trainer or Fabric has put around it, or itself."""
    is_wrapped = isinstance(optimizer, (LightningOptimizer, _FabricOptimizer))
    found: Optimizer = optimizer.optimizer if is_wrapped else optimizer
    return found


_CTRL_C = 128
_MAX_RANK = _CTRL_C - 2


class StopRequest:
    """Stops all ranks after the same step on SIGTERM or Ctrl-C on any rank.

    What a rank was asked is one number, of which the largest counts: 1 + its rank for SIGTERM, 128
    more for Ctrl-C. In training it travels with the flags of every step, or, before a batch whose
    predecessor has not stepped, in the place of Lightning's own question. Elsewhere, such as in
    validation, it travels over the board of failures, at which every rank looks twice a second. A
    rank that has heard of it raises Lightning's `SIGTERMException` at the end of the batch.

    The second Ctrl-C ends the process at once. Outside of training it raises, on this rank alone.

    Args:
        trainer: Mutated until `disconnect`: its handlers of signals, its loop's question.
        board: Of this run.
        before: The run before, whose wish may have come too late for it.

    Attributes:
        heard: What all ranks end for; see above; 0: nothing.
    """

    def __init__(self, trainer: Any, board: FailureBoard, before: StopRequest | None) -> None:
        self.trainer, self._board = trainer, board
        self.heard = 0
        if before is not None and not before.heard:
            board.asked = before.asked
        private_names.STOP_HANDLER.replace_in(
            private_names.SIGNAL_CONNECTOR.of(trainer), self._on_signal
        )

    @property
    def asked(self) -> int:
        """Returns what this rank was asked, or has heard on the board."""
        return self._board.asked

    def take_ctrl_c(self) -> None:
        """Handles Ctrl-C from here on, if nobody else does; Lightning puts the handler back."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        is_ctrl_c = number == signal.SIGINT
        if is_ctrl_c and not self.trainer.training:
            raise KeyboardInterrupt
        if is_ctrl_c:
            signal.signal(number, signal.SIG_DFL)
        rank = min(self._board.rank, _MAX_RANK)
        self._board.asked = max(self.asked, 1 + rank + _CTRL_C * is_ctrl_c)

    def ask_through(self, training: Training) -> None:
        """Lets the wish travel in each round of `training`, and answers the loop's question."""
        signal, collectives = training.signal, training.collectives
        signal.ask, signal.on_heard = lambda: self.asked, self._hear

        def answer() -> None:
            heard, signal.heard = signal.heard, None
            if heard is None:
                try:
                    heard = max(collectives.all_gather_object(self.asked))
                except RuntimeError as error:
                    raise RuntimeError(
                        "This rank has made no step of late and asks whether all are to stop;"
                        " nobody answers. If others made one, that is why: let no rank leave out a"
                        " backward or a step that others make."
                    ) from error
            if heard:
                self._hear(heard)
                raise SIGTERMException

        # Lightning asks since version 2.6.
        if _ASKS:
            private_names.STOP_QUESTION.replace_in(self.trainer.fit_loop.epoch_loop, answer)

    def tell(self, asked: int) -> None:
        """Takes what was found on the board; in a step others are waited for, and told by flags."""
        if not self.trainer.training:
            self._hear(asked)

    def _hear(self, asked: int) -> None:
        private_names.SIGNAL_CONNECTOR.of(self.trainer).received_sigterm = True
        if not self.heard:
            self.heard = asked
            log.warning("%s: all ranks end.", self)

    def __str__(self) -> str:
        rank, how = self.heard % _CTRL_C - 1, "Ctrl-C" if self.heard > _CTRL_C else "SIGTERM"
        return f"{f'Rank {rank}' if rank < _MAX_RANK else 'A rank'} was asked to stop ({how})"

    def end_by(self, exception: BaseException) -> str:
        """Says who was asked for the end that `exception` is; after Ctrl-C the exit code is 1."""
        if not (self.heard and isinstance(exception, SIGTERMException)):
            return ""
        exception.code = 1 if self.heard > _CTRL_C else None
        return str(self)

    def disconnect(self) -> None:
        """Undoes what was done to the trainer, and tells those that expect more of this rank."""
        private_names.STOP_HANDLER.restore_in(private_names.SIGNAL_CONNECTOR.of(self.trainer))
        private_names.STOP_QUESTION.restore_in(self.trainer.fit_loop.epoch_loop)
        if self.trainer.state.fn == TrainerFn.FITTING and not self._board.has_failed:
            num_batches = self.trainer.fit_loop.total_batch_idx + 1
            self._board.leave(
                f"has ended its training after {num_batches} batches and {self.trainer.global_step}"
                " steps, and others expect more: give all ranks equally many batches, such as by"
                " Trainer(limit_train_batches=...), and let no rank leave out a backward or a"
                " step that others make."
            )
