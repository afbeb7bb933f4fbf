"""Puts the mean gradient into `.grad` before hooks that may look at it or change it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer
from typing_extensions import override

_AFTER_BACKWARD = ("on_after_backward",)
_BEFORE_STEP = ("on_before_optimizer_step", "configure_gradient_clipping")


def gradient_readers(owners: Iterable[Callback | LightningModule]) -> dict[str, list[str]]:
    """Hook -> names of the classes that override it, for hooks that may look at `.grad`."""
    readers: dict[str, list[str]] = {}
    for owner in owners:
        for hook in (*_AFTER_BACKWARD, *_BEFORE_STEP):
            if hasattr(owner, hook) and is_overridden(hook, owner):
                readers.setdefault(hook, []).append(type(owner).__name__)
    return readers


class GradientGuard(Callback):
    """Stands before the user's callbacks, where a hook between backward and step is overridden.

    Each rank has only its shard of the mean gradient; DistributedDataParallel leaves all of it in
    `.grad`. So it is gathered for such a hook, and taken back, with what the hook did to it.

    Args:
        hooks: Those that are overridden; see `gradient_readers`.
        expose: Fills `.grad` of an optimizer's parameters; None: of all. Collective, blocks.
    """

    def __init__(self, hooks: Iterable[str], expose: Callable[[Optimizer | None], None]) -> None:
        self._hooks = frozenset(hooks)
        self._expose = expose

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._hooks.intersection(_AFTER_BACKWARD):
            self._expose(None)

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        if self._hooks.intersection(_BEFORE_STEP):
            self._expose(optimizer)
