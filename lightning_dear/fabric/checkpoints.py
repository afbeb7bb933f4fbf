"""The part of the strategy that gives and takes states: torch's ordinary formats, one file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.strategies.ddp import DDPStrategy
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dear.checkpoint.format import KEY, check, forget_masters, stamp
from lightning_dear.fabric.access import inner
from lightning_dear.fabric.module import DearModule, part_of


class FabricCheckpoints(DDPStrategy):
    """Files that "ddp" loads, and that load at any world size; the other way round too."""

    complete_parameters: Callable[[str], None]

    @override
    def get_module_state_dict(self, module: Module) -> dict[str, Any]:
        self.complete_parameters("state_dict")
        return super().get_module_state_dict(_plain(module))

    @override
    def load_module_state_dict(
        self, module: Module, state_dict: Mapping[str, Any], strict: bool = True
    ) -> None:
        self.complete_parameters("load_state_dict")
        super().load_module_state_dict(_plain(module), dict(state_dict), strict=strict)

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state in torch's format, on every rank. Collective, blocks."""
        part = part_of(inner(optimizer))
        return (
            super().get_optimizer_state(optimizer) if part is None else part.optimizer_state_dict()
        )

    @override
    def save_checkpoint(
        self, path: str | Path, state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Writes torch's ordinary format, and the format number. All ranks call; blocks."""
        if any(isinstance(one, (DearModule, Optimizer)) for one in state.values()):
            state = dict(state)
            stamp(state)
        super().save_checkpoint(path, state, *args, **kwargs)

    @override
    def load_checkpoint(
        self, path: str | Path, state: Any = None, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Every rank reads the file, into `state`. Blocks.

        Returns:
            What of the file is not in `state`; everything if there is no `state`.

        Raises:
            ValueError: If the file's format number is unknown; nothing is changed then.
        """
        plain = self.checkpoint_io
        self.checkpoint_io = CheckingIO(plain)
        try:
            rest = super().load_checkpoint(path, state, *args, **kwargs)
        finally:
            self.checkpoint_io = plain
        if state:
            rest.pop(KEY, None)
        return rest


class CheckingIO(CheckpointIO):
    """Loads as `inner` does, and refuses what a later version of this package wrote.

    Args:
        inner: Loads.
    """

    def __init__(self, inner: CheckpointIO) -> None:
        self._inner = inner

    @override
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """As `inner` does."""
        self._inner.save_checkpoint(*args, **kwargs)

    @override
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """As `inner` does.

        Raises:
            ValueError: If the format number is unknown.
        """
        checkpoint = self._inner.load_checkpoint(*args, **kwargs)
        check(checkpoint)
        if KEY not in checkpoint:
            forget_masters(checkpoint)
        return checkpoint

    @override
    def remove_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """As `inner` does."""
        self._inner.remove_checkpoint(*args, **kwargs)


def _plain(module: Module) -> Module:
    return module.module if isinstance(module, DearModule) else module
