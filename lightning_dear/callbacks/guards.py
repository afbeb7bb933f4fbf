"""Waits for parameters, and gathers gradients, before hooks of the user that may read them."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dear.callbacks import compression_schedule, fusion_tuner, monitor, timeline
from lightning_dear.callbacks.batch_split import BatchSplit

_AFTER_BACKWARD = "on_after_backward"
_BEFORE_STEP = ("on_before_optimizer_step", "configure_gradient_clipping")

_NON_READERS: set[type[Callback]] = {
    BatchSplit,
    compression_schedule.CompressionSchedule,
    monitor.DearMonitor,
    fusion_tuner.FusionTuner,
    timeline.TimelineCallback,
    callbacks.DeviceStatsMonitor,
    callbacks.LearningRateMonitor,
    callbacks.ModelCheckpoint,
    callbacks.RichProgressBar,
    callbacks.TQDMProgressBar,
    callbacks.ThroughputMonitor,
    callbacks.Timer,
}
"""Callbacks before whose batch hooks `CompletionGuard` does not wait. The hooks read no weights, or
read them only through `state_dict()`, which waits by itself. Most trainers have such a callback,
for instance a progress bar, so that waiting would undo the overlap. Subclasses do not count."""


def _completing(hook: str, *, for_readers: bool = False) -> Callable[..., None]:
    """Returns a hook of `CompletionGuard` that blocks until all parameters have their new values.

    Args:
        hook: Name of the hook.
        for_readers: Whether to wait only if the module, or a callback that is not in
            `_NON_READERS`, has overridden this hook. If False, the hook always waits.
    """

    def complete(guard: "CompletionGuard", trainer: Any, module: LightningModule, *_: Any) -> None:
        if not for_readers:
            guard.complete(hook)
        elif reader := guard.reader_of(hook, (*trainer.callbacks, module)):
            guard.complete(f"{reader}.{hook}")

    return complete


@dataclass(eq=False)
class CompletionGuard(Callback):
    """Completes parameters and gradients before hooks that may read them, and reports failures.

    It must be the first of the trainer's callbacks, so that its hooks run before all others.

    Its hooks block until all parameters have the values of the last step. Hooks of epochs, of the
    start of validation, of the end of training and of checkpoints always do. The hooks of batches
    do only if the module, or a callback that is not in `_NON_READERS`, has overridden the same
    hook.

    Between backward and step a rank has only its shard of the mean gradient, whereas under DDP
    `.grad` holds all of it. If `gradient_hooks` names a hook that runs there, the mean gradient is
    gathered into `.grad` before that hook runs. The step uses `.grad` as the hook leaves it.

    Attributes:
        complete: Function that blocks until parameters are complete. Its argument is the name of
            the wait in timelines.
        on_failure: Function that reports an exception to the other ranks. It is called before other
            callbacks see the exception, because some of them write checkpoints and so wait for the
            other ranks.
        gradient_hooks: Names of overridden hooks that may read `.grad`, see `gradient_readers`.
            Empty means that no gradient is gathered into `.grad`.
        expose: Function that gathers the mean gradient into `.grad` of an optimizer's parameters.
            None as its argument means all optimizers. Collective. Blocks.
        end_backward: Function that is called after each backward, before all other hooks.
        end_batch: Function that is called after each batch, before all other hooks.
    """

    complete: Callable[[str], None]
    on_failure: Callable[[BaseException], None] = lambda _: None
    gradient_hooks: Collection[str] = ()
    expose: Callable[[Optimizer | None], None] = lambda _: None
    end_backward: Callable[[], None] = lambda: None
    end_batch: Callable[[], None] = lambda: None
    _readers: dict[tuple[str, tuple[int, ...]], str | None] = field(default_factory=dict)

    def insert(self, trainer: Any, *, at_end: bool = False) -> None:
        """Puts this guard before, or after, all other callbacks, in place of an earlier one."""
        others = [one for one in trainer.callbacks if not isinstance(one, CompletionGuard)]
        trainer.callbacks[:] = [*others, self] if at_end else [self, *others]

    def reader_of(self, hook: str, owners: Sequence[Callback | LightningModule]) -> str | None:
        """Returns the class name of the first callback or module that may read weights in `hook`.

        That is the first that has overridden `hook` and whose class is not in `_NON_READERS`. None
        means that there is none.
        """
        # Cached by the list of callbacks, because callbacks may be added during a fit.
        key = hook, tuple(map(id, owners))
        if key not in self._readers:
            # Compared by exact class, because a subclass of a known callback may read weights.
            known = {CompletionGuard, *_NON_READERS}
            unknown = (one for one in owners if type(one) not in known)
            readers = (type(one).__name__ for one in unknown if is_overridden(hook, one))
            self._readers[key] = next(readers, None)
        return self._readers[key]

    on_train_batch_start = _completing("on_train_batch_start", for_readers=True)
    _behind_batch = _completing("on_train_batch_end", for_readers=True)
    on_train_epoch_start = _completing("on_train_epoch_start")
    on_train_epoch_end = _completing("on_train_epoch_end")
    on_train_end = _completing("on_train_end")
    on_validation_start = _completing("on_validation_start")
    on_save_checkpoint = _completing("on_save_checkpoint")

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.end_batch()
        self._behind_batch(trainer, pl_module)

    @override
    def on_exception(self, trainer: Trainer, _: Any, exception: BaseException) -> None:
        self.on_failure(exception)

    @override
    def on_after_backward(self, *_: Any) -> None:
        self.end_backward()
        if _AFTER_BACKWARD in self.gradient_hooks:
            self.expose(None)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, _: Any, optimizer: Optimizer) -> None:
        if any(hook in self.gradient_hooks for hook in _BEFORE_STEP):
            self.expose(optimizer)


def owners_of_hooks(trainer: Any) -> tuple[Callback | LightningModule, ...]:
    """Returns the trainer's callbacks and its module."""
    return (*trainer.callbacks, trainer.lightning_module)


def complete_behind_step(trainer: Any, complete: Callable[[str], None]) -> None:
    """Completes parameters after an automatic step whose code goes on in a hook of the module.

    That code may use weights through references that no gate sees, such as the optimizer's groups.

    Args:
        trainer: The trainer, in a fit.
        complete: Same as the attribute of `CompletionGuard`.
    """
    module, schedulers = trainer.lightning_module, trainer.lr_scheduler_configs
    is_by_step = any(one.interval == "step" for one in schedulers)
    for hook in ("optimizer_step", "lr_scheduler_step")[: 1 + is_by_step]:
        if module.automatic_optimization and is_overridden(hook, module):
            complete(hook)


def gradient_readers(owners: Iterable[Callback | LightningModule]) -> dict[str, list[str]]:
    """Returns hook -> names of classes that override it, for hooks between backward and step.

    Hooks that no class overrides have no entry.

    Args:
        owners: The trainer's callbacks and the module.
    """
    readers: dict[str, list[str]] = {}
    for owner in owners:
        # `CompletionGuard` has these hooks itself, and reads no gradient.
        for hook in () if isinstance(owner, CompletionGuard) else (_AFTER_BACKWARD, *_BEFORE_STEP):
            if hasattr(owner, hook) and is_overridden(hook, owner):
                readers.setdefault(hook, []).append(type(owner).__name__)
    return readers
