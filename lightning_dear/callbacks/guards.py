"""What hooks of the user's read: parameters are completed, and gradients gathered, in front."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dear.callbacks import compression_schedule, fusion_tuner, monitor, timeline

_AFTER_BACKWARD = ("on_after_backward",)
_BEFORE_STEP = ("on_before_optimizer_step", "configure_gradient_clipping")

_NON_READERS: set[type[Callback]] = {
    compression_schedule.CompressionSchedule,
    monitor.DearMonitor,
    fusion_tuner.FusionTuner,
    timeline.TimelineCallback,
    lightning_callbacks.DeviceStatsMonitor,
    lightning_callbacks.LearningRateMonitor,
    lightning_callbacks.ModelCheckpoint,
    lightning_callbacks.RichProgressBar,
    lightning_callbacks.TQDMProgressBar,
    lightning_callbacks.ThroughputMonitor,
    lightning_callbacks.Timer,
}
"""Callbacks with batch hooks of which we know that these read weights through `state_dict()` or
not at all. Waiting before every callback would undo the overlap: progress bars have such hooks."""


def _completing(hook: str, *, for_readers: bool = False) -> Callable[..., None]:
    """That hook of a `CompletionGuard`: waits always, or if a hook behind it may read weights."""

    def complete(guard: CompletionGuard, trainer: Any, module: LightningModule, *_: Any) -> None:
        if not for_readers:
            guard.complete(hook)
        elif reader := guard.reader_of(hook, trainer.callbacks, module):
            guard.complete(f"{reader}.{hook}")

    return complete


class CompletionGuard(Callback):
    """Stands first among the trainer's callbacks, so that it runs before all others.

    Before batch hooks it waits only if a callback outside the known ones, or the module itself,
    overrides them; before everything that happens outside the training loop it always waits.

    Between backward and step each rank has only its shard of the mean gradient, where
    DistributedDataParallel leaves all of it in `.grad`. Where a hook is overridden there, it is
    gathered in front, and taken back later, with what the hook did to it.

    Args:
        complete: Completes the parameters; takes the reason, for the timeline.
        on_failure: Told of an exception before other callbacks are, some of which save and so wait
            for other ranks.
        gradient_hooks: Overridden hooks that may look at `.grad`; see `gradient_readers`.
        expose: Fills `.grad` of an optimizer's parameters; None: of all. Collective, blocks.
    """

    def __init__(
        self,
        complete: Callable[[str], None],
        on_failure: Callable[[BaseException], None] | None = None,
        gradient_hooks: Iterable[str] = (),
        expose: Callable[[Optimizer | None], None] = lambda _: None,
    ) -> None:
        self.complete, self._on_failure = complete, on_failure
        self._gradient_hooks, self._expose = frozenset(gradient_hooks), expose
        self._readers: dict[tuple[str, tuple[int, ...]], str | None] = {}

    def reader_of(
        self, hook: str, callbacks: list[Callback], module: LightningModule
    ) -> str | None:
        """Returns the class of the first of `callbacks` and `module` that may read weights."""
        # Looked for once only, but anew where a callback has been added in the midst of a fit.
        key = hook, tuple(id(callback) for callback in callbacks)
        if key not in self._readers:
            # By exact class: what a subclass of a known one reads is not known.
            known = {CompletionGuard, *_NON_READERS}
            unknown = (one for one in (*callbacks, module) if type(one) not in known)
            readers = (type(one).__name__ for one in unknown if is_overridden(hook, one))
            self._readers[key] = next(readers, None)
        return self._readers[key]

    on_train_batch_start = _completing("on_train_batch_start", for_readers=True)
    on_train_batch_end = _completing("on_train_batch_end", for_readers=True)
    on_train_epoch_start = _completing("on_train_epoch_start")
    on_train_epoch_end = _completing("on_train_epoch_end")
    on_train_end = _completing("on_train_end")
    on_validation_start = _completing("on_validation_start")
    on_save_checkpoint = _completing("on_save_checkpoint")

    @override
    def on_exception(self, trainer: Trainer, _: Any, exception: BaseException) -> None:
        if self._on_failure is not None:
            self._on_failure(exception)

    @override
    def on_after_backward(self, *_: Any) -> None:
        if self._gradient_hooks.intersection(_AFTER_BACKWARD):
            self._expose(None)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, _: Any, optimizer: Optimizer) -> None:
        if self._gradient_hooks.intersection(_BEFORE_STEP):
            self._expose(optimizer)


def gradient_readers(owners: Iterable[Callback | LightningModule]) -> dict[str, list[str]]:
    """Returns hook -> names of the classes that override it, for hooks that may see `.grad`."""
    readers: dict[str, list[str]] = {}
    for owner in owners:
        # Ours stands in front of those that read.
        for hook in () if isinstance(owner, CompletionGuard) else (*_AFTER_BACKWARD, *_BEFORE_STEP):
            if hasattr(owner, hook) and is_overridden(hook, owner):
                readers.setdefault(hook, []).append(type(owner).__name__)
    return readers
