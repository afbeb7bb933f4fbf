"""Connects parts of Lightning to a fit's pipeline, and disconnects them when the fit ends.

Lightning's precision plug-ins clip and unscale `.grad`, which does not hold the mean gradient here.
They are connected to the gradients of this rank's shards.

Lightning's handler of SIGTERM makes a broadcast inside the handler. If only one rank gets the
signal, that rank waits for the others, which never join the broadcast. Since version 2.6 Lightning
also broadcasts before every batch whether rank 0 got a signal. That broadcast queues behind the
all-gathers of parameters, and all ranks would wait for it, so that all-gathers would not overlap
with forward. `StopRequest` replaces both: any rank's wish to stop travels with the flags that end
each round of reduce-scatters (`Signal`).
"""

import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import plugins, wrappers
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import data, exceptions, rank_zero_warn, types
from torch import Tensor, optim

from lightning_dear import private_names, versions
from lightning_dear.callbacks import TimelineCallback
from lightning_dear.callbacks.fusion_tuner import FusionTuner
from lightning_dear.collectives.store import from_all_ranks
from lightning_dear.engine.notes import Signal
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.engine.step import OptimizerPipeline
from lightning_dear.engine.training import Training
from lightning_dear.planning import FusionPlanner, SearchingPlanner
from lightning_dear.strategy.failures import FailureBoard
from lightning_dear.strategy.starting import max_restarts, warn_of_restarts_from_step_0

log = logging.getLogger(__name__)

_FabricOptimizer = private_names.FABRIC_OPTIMIZER.of(wrappers)
_ASKS = versions.is_inside(pl.__version__, "2.6", "1000")  # type: ignore[attr-defined]


def append_callbacks(trainer: pl.Trainer, planner: FusionPlanner, *own: pl.Callback | None) -> None:
    """Adds the callbacks that the options need to the trainer, unless it has them. Collective.

    The environment variable LIGHTNING_DEAR_TIMELINE=FOLDER asks for a `TimelineCallback`. It is
    ignored, and rank 0 warns, if the trainer has such a callback for another folder. Outside of
    `Trainer.fit` nothing is added.

    Ranks then tell each other which callbacks they have that exchange figures between ranks. If
    these differ, rank 0 warns, and they exchange nothing: some ranks would wait for others that
    never come.

    Args:
        trainer: The trainer. Its list of callbacks is mutated.
        planner: Planner of the strategy. A `SearchingPlanner` needs a `FusionTuner`.
        *own: Callbacks of the strategy's options. None means that an option needs no callback.
    """
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
        rank_zero_warn("LIGHTNING_DEAR_TIMELINE is ignored. Unset it, or remove TimelineCallback.")
    callbacks.extend(one for one in own if one is not None and one not in callbacks)
    comparing: list[Any] = [one for one in callbacks if hasattr(one, "is_on_all_ranks")]
    named = [f"{type(one).__name__}({getattr(one, 'step', '')})" for one in comparing]
    everyones = from_all_ranks(named)
    are_alike = all(other == named for other in everyones)
    for one in comparing:
        one.is_on_all_ranks = are_alike and len(everyones) > 1
    if not are_alike:
        rank_zero_warn(
            f"No rank is named as late, since ranks have different callbacks: {everyones}. Pass the"
            " same to the Trainers of all ranks, and set LIGHTNING_DEAR_TIMELINE on all or none."
        )


def connect_wrappers(wrappers: Sequence[LightningOptimizer], pipeline: Pipeline) -> None:
    """Lets the trainer's optimizer wrappers call the pipeline's `zero_grad`. Mutates them.

    Raises:
        RuntimeError: If they wrap other optimizers than those of the pipeline.
    """
    if [one.optimizer for one in wrappers] != pipeline.optimizers:
        raise RuntimeError(
            "trainer.optimizers was assigned in the midst of a fit, and strategy='dear' trains"
            " on with those of configure_optimizers. Return all of them there and step by"
            " turns, change the param_groups of one, or begin another fit."
        )
    for wrapper in wrappers:
        # Otherwise the wrapper's own `zero_grad`, torch's, would not call the pipeline's.
        wrapper.zero_grad = wrapper.optimizer.zero_grad  # type: ignore[attr-defined]


def connect_precision(precision: plugins.Precision, pipeline: Pipeline) -> None:
    """Makes `precision` clip and unscale the shards' gradients, until `disconnect_precision`.

    Lightning's `clip_gradients`, `configure_gradient_clipping` and `gradient_clip_val` all call the
    methods that are replaced. Clipping becomes collective.

    Args:
        precision: Plug-in of the trainer. Mutated.
        pipeline: Pipeline of the fit.
    """

    def part_of(optimizer: optim.Optimizer) -> OptimizerPipeline:
        return pipeline.of(unwrapped(optimizer))

    vars(precision).update(
        clip_grad_by_norm=lambda optimizer, by: part_of(optimizer).mean.clip_by_norm(float(by)),
        clip_grad_by_value=lambda optimizer, by: part_of(optimizer).mean.clip_by_value(float(by)),
    )
    connect_scaler(precision, pipeline, part_of)


def connect_scaler(
    precision: plugins.Precision,
    pipeline: Pipeline,
    part_of: Callable[[optim.Optimizer], OptimizerPipeline | None],
) -> None:
    """Makes a GradScaler unscale the shards' gradients, and lets `pipeline` read its loss scale.

    Args:
        precision: Plug-in that may have a GradScaler, which is mutated. Without one nothing is
            done.
        pipeline: Pipeline that gets a function which returns the loss scale.
        part_of: Returns the `OptimizerPipeline` of an optimizer. None means that the optimizer is
            stepped by torch alone, so that its gradients are unscaled as usual.
    """
    scaler = getattr(precision, "scaler", None)
    if scaler is None:
        return
    vars(scaler).pop("unscale_", None)
    unscale = scaler.unscale_

    def on_shards(optimizer: optim.Optimizer) -> None:
        part = part_of(optimizer)
        unscale(optimizer) if part is None else part.mean.unscale(unscale)

    scaler.unscale_ = on_shards
    for part in pipeline.parts:
        part.plans.loss_scale = partial(loss_scale, scaler, part.parameters[0].device)


def weigh_batch(pipeline: Pipeline, module: Any, batch: Any, output: types.STEP_OUTPUT) -> None:
    """Gives a batch its number of samples as its weight, unless the user has given it one.

    The first tensor's length counts, as in `LightningModule.log`. In manual optimization it ends
    the batch instead, all backwards of which have run. Does nothing if batches have no weights.

    Args:
        pipeline: Pipeline of the fit.
        module: The LightningModule.
        batch: The batch. Not read if it has a weight.
        output: What its `training_step` has returned. None means weight 0: no backward follows.

    Raises:
        ValueError: If no number of samples is found.
    """
    weights = pipeline.training.weights
    if not weights.is_on:
        return
    if not module.automatic_optimization:
        weights.forget()
    elif output is None:
        weights.weigh(0.0, has_loss=False)
    elif not weights.is_expecting:
        if weights.was_given:
            raise ValueError(
                "This batch has no weight, and earlier ones had: samples would be mixed with"
                " tokens, or what strategy.weigh(n) was given. Call it for each batch, with 0 for"
                " one that does not count."
            )
        found = private_names.BATCH_SIZES.of(data)(batch)
        sizes = iter([one for one in found if one is not None])
        if (size := next(sizes, None)) is None:
            raise ValueError(
                "weights='samples' finds no number of samples in this batch. Call"
                " self.trainer.strategy.weigh(n) in training_step."
            )
        if any(one != size for one in sizes):
            rank_zero_warn(
                f"Tensors of this batch have other lengths than the first one, whose length {size}"
                " counts as the number of samples. If that is wrong, call"
                " self.trainer.strategy.weigh(n) in training_step."
            )
        weights.weigh(size)


def loss_scale(scaler: Any, device: torch.device) -> Tensor:
    """Returns the loss scale of a GradScaler, as a tensor on `device`. Does not block."""
    # `get_scale` would copy the scale to the CPU, and so wait for the device.
    scaled: Tensor = scaler.scale(torch.ones(1, dtype=torch.float32, device=device))
    return scaled


def disconnect_precision(precision: plugins.Precision) -> None:
    """Undoes `connect_precision`. Idempotent."""
    for name in ("clip_grad_by_norm", "clip_grad_by_value"):
        vars(precision).pop(name, None)
    scaler = getattr(precision, "scaler", None)
    if scaler is not None:
        vars(scaler).pop("unscale_", None)


def unwrapped(optimizer: Any) -> optim.Optimizer:
    """Returns the torch optimizer inside a Trainer's or Fabric's wrapper, or `optimizer` itself."""
    is_wrapped = isinstance(optimizer, (LightningOptimizer, _FabricOptimizer))
    found: optim.Optimizer = optimizer.optimizer if is_wrapped else optimizer
    return found


_CTRL_C = 128
"""Added to a wish to stop that came from Ctrl-C and not from SIGTERM, see `StopRequest`."""

RESTART = 143
"""Exit code of a process that SIGTERM has ended. After it torchrun starts its ranks again."""

_MAX_RANK = _CTRL_C - 2
"""Largest rank in a wish to stop, which must fit into a byte. It stands for itself and for all
larger ranks. Messages then name no rank."""


class StopRequest:
    """Stops all ranks after the same step on SIGTERM or Ctrl-C on any rank.

    A rank's wish to stop is a number: 1 + its rank for SIGTERM, and 128 more for Ctrl-C. 0 means no
    wish. All ranks take the maximum, so that they stop for the same reason.

    In training the wishes travel with the flags that end each round of reduce-scatters. If there
    was no round since the last batch, all ranks send each other their wishes before the next batch,
    in place of the broadcast of Lightning 2.6 and later. A wish is also written on the
    `FailureBoard`, which every rank reads twice a second. What is read there counts only outside of
    training, such as in validation. A rank that has received a wish raises Lightning's
    `SIGTERMException` at the end of the batch, or before the next one.

    SLURM's signal (`auto_requeue`) counts as SIGTERM. When all ranks stop, Lightning's handler of
    it saves a checkpoint, which is collective, and lets SLURM start the job again.

    A second Ctrl-C ends the process at once. A Ctrl-C outside of training raises KeyboardInterrupt
    on this rank only.

    Args:
        trainer: The trainer. Mutated until `disconnect`: its signal handlers, and the method by
            which its training loop asks all ranks for signals.
        board: The board of this run.
        before: The `StopRequest` of the run before. A wish for which that run did not stop any more
            counts for this one. None means no earlier run.
        is_elastic: Whether ranks of hosts that got no SIGTERM end with `RESTART`, for torchrun.

    Attributes:
        heard: The wish for which all ranks stop. 0 means that this rank has received none.
    """

    def __init__(
        self,
        trainer: Any,
        board: FailureBoard,
        before: "StopRequest | None",
        is_elastic: bool = False,
    ) -> None:
        self.trainer, self.board = trainer, board
        self.heard = 0
        self._is_elastic, self._got_sigterm = is_elastic, False
        if before is not None and not before.heard:
            board.asked = before.board.asked
        self._connector = private_names.SIGNAL_CONNECTOR.of(trainer)
        private_names.STOP_HANDLER.replace_in(self._connector, self._on_signal)
        private_names.REQUEUE_HANDLER.replace_in(self._connector, self._on_requeue)
        self._slurms = 0

    def take_ctrl_c(self) -> None:
        """Makes Ctrl-C a wish to stop from now on, unless the user has a handler of SIGINT.

        Does nothing outside of the main thread. Lightning puts the earlier handler back at the end
        of the fit.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        is_ctrl_c = number == signal.SIGINT
        if is_ctrl_c and not self.trainer.training:
            raise KeyboardInterrupt
        if is_ctrl_c:
            signal.signal(number, signal.SIG_DFL)
        self._got_sigterm |= not is_ctrl_c
        rank = min(self.board.rank, _MAX_RANK)
        self.board.asked = max(self.board.asked, 1 + rank + _CTRL_C * is_ctrl_c)

    def _on_requeue(self, number: int, frame: Any) -> None:
        self._slurms = number
        self._on_signal(number, frame)

    def _requeue(self) -> None:
        """Calls Lightning's handler if any rank got SLURM's signal. Collective. Blocks."""
        environment = self.trainer.strategy.cluster_environment
        if not getattr(environment, "auto_requeue", False):
            return
        said = self.board.end_with(str(self._slurms))
        if not said:
            log.warning("Not saved, not requeued: not all ranks have stopped in time.")
        if number := max(map(int, said), default=0):
            private_names.REQUEUE_HANDLER.restore_in(self._connector)
            private_names.REQUEUE_HANDLER.of(self._connector)(number, None)

    def ask_through(self, training: Training, rounds: Signal | None = None) -> None:
        """Sends the wish with each round of `training`, and replaces Lightning's own broadcast.

        The replacement is collective if `training` had no round since the last batch. It raises
        `SIGTERMException` if any rank wishes to stop, and RuntimeError if ranks do not answer.

        Args:
            training: The fit's training.
            rounds: Signal that travels with exchanges of local steps. It takes the place of the
                training's, and nothing is asked between exchanges. None means no local steps.
        """
        warn_of_restarts_from_step_0(self.trainer)
        signal, collectives = rounds or training.signal, training.collectives
        signal.ask, signal.on_heard = lambda: self.board.asked, self._hear
        signal.heard = unheard = None if rounds is None else 0

        def answer() -> None:
            heard, signal.heard = signal.heard, unheard
            if heard is None:
                try:
                    # No step has told how many batches ranks have ahead, either.
                    said = collectives.all_gather_object((self.board.asked, training.end.ahead))
                    heard, ahead = map(max, zip(*said, strict=True))
                    training.end.hear(training.end.given, ahead)
                except RuntimeError as error:
                    raise RuntimeError(
                        "Other ranks do not answer this rank before its next batch. If one failed,"
                        " mend its error. If none did, make the same backwards and steps on all"
                        " ranks: this rank has made no step since its last batch, and the others"
                        " have probably made one."
                    ) from error
            if heard:
                self._hear(heard)
                raise exceptions.SIGTERMException

        # Older versions of Lightning do not broadcast before a batch.
        if _ASKS:
            private_names.STOP_QUESTION.replace_in(self.trainer.fit_loop.epoch_loop, answer)

    def tell(self, asked: int) -> None:
        """Receives a wish that was read on the board. In training it does nothing.

        In training the flags of a round bring the wish, to all ranks in the same step.

        Args:
            asked: The wish.
        """
        if not self.trainer.training:
            self._hear(asked)

    def _hear(self, asked: int) -> None:
        self._connector.received_sigterm = True
        if not self.heard:
            self.heard = asked
            log.warning("%s: all ranks end.", self)

    def __str__(self) -> str:
        rank, how = self.heard % _CTRL_C - 1, "Ctrl-C" if self.heard > _CTRL_C else "SIGTERM"
        return f"{f'Rank {rank}' if rank < _MAX_RANK else 'A rank'} was asked to stop ({how})"

    def end_by(self, exception: BaseException) -> str:
        """Returns a sentence that says which rank was asked to stop, if `exception` is for that.

        Empty means that the run ends for another reason: no wish was received, or `exception` is no
        `SIGTERMException`. Otherwise the exit code of `exception` is set, to 1 after Ctrl-C. After
        SIGTERM it is None, which means 0, or `RESTART`: see `_code`.
        """
        if not (self.heard and isinstance(exception, exceptions.SIGTERMException)):
            return ""
        exception.code = 1 if self.heard > _CTRL_C else self._code
        return str(self)

    @cached_property
    def _code(self) -> int | None:
        """The exit code after SIGTERM: None, which means 0, or `RESTART`.

        Collective with `is_elastic` or under SLURM, and blocks. It is `RESTART` on hosts of which
        no rank got the signal, if torchrun has restarts left. The counts of restarts may differ
        from host to host, and the largest one counts. If ranks do not tell each other in time, each
        decides by what it knows itself.
        """
        if not self._is_elastic:
            self._requeue()
            return None
        host, count = (
            int(os.environ[name]) for name in ("GROUP_RANK", "TORCHELASTIC_RESTART_COUNT")
        )
        said = self.board.end_with(json.dumps((host, self._got_sigterm, count)))
        if not said:
            log.warning("Not all ranks have told in time whether their hosts got SIGTERM.")
            return None if self._got_sigterm or count >= max_restarts() else RESTART
        told = [json.loads(one) for one in said]
        asked = {one for one, got_sigterm, _ in told if got_sigterm}
        has_left = max((one for *_, one in told)) < max_restarts()
        return RESTART if asked and host not in asked and has_left else None

    def disconnect(self) -> None:
        """Undoes the changes to the trainer.

        After a fit that has not failed, writes on the board that this rank has ended, and after how
        many steps. Another rank that waits for more steps of this rank reads that and quotes it.
        """
        private_names.STOP_HANDLER.restore_in(self._connector)
        private_names.REQUEUE_HANDLER.restore_in(self._connector)
        private_names.STOP_QUESTION.restore_in(self.trainer.fit_loop.epoch_loop)
        if self.trainer.state.fn == TrainerFn.FITTING and not self.board.has_failed:
            num_batches = self.trainer.fit_loop.total_batch_idx + 1
            self.board.leave(
                f"has ended its training after {num_batches} batches and {self.trainer.global_step}"
                " steps, and others expect more. Give all ranks equally many batches, such as by"
                " Trainer(limit_train_batches=...), and make the same backwards and steps on all"
                " ranks."
            )
