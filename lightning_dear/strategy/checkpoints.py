"""The part of the strategy that writes, reads and removes checkpoints: files or folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

from lightning_dear.checkpoint.folder import is_folder, load, remove, save
from lightning_dear.checkpoint.format import KEY, check, forget_masters, stamp


class CheckpointAccess(DDPStrategy):
    """Writes ordinary files, or folders with `save_distributed_checkpoint`; reads both always.

    Lightning asks all ranks to save and to load, and tells all to remove.
    """

    _saves_folders = False

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Writes `checkpoint`, with the format number. All ranks call; blocks.

        Raises:
            TypeError: If `storage_options` are given for a folder, which has none.
        """
        stamp(checkpoint)
        if not self._saves_folders:
            self._remove_folder(filepath)
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise TypeError(
                "save_distributed_checkpoint=True writes through the file system and knows no"
                " storage_options; leave out one of them."
            )
        # Names may hold a time of day, which ranks read at different moments.
        save(self.broadcast(filepath), checkpoint)

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """The ordinary checkpoint, from a file or a folder. Every rank reads it in whole.

        Raises:
            ValueError: If it is damaged or of an unknown format.
        """
        if is_folder(checkpoint_path):
            # Lightning 2.5 does not pass it.
            weights_only = kwargs.get("weights_only", *args[:1])
            return load(checkpoint_path, weights_only=weights_only)
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        check(checkpoint)
        if KEY not in checkpoint:
            forget_masters(checkpoint)
        return checkpoint

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Removes a file or a folder; rank 0 does."""
        if not self._remove_folder(filepath):
            super().remove_checkpoint(filepath)

    def _remove_folder(self, path: str | Path) -> bool:
        was_folder = is_folder(path)
        if was_folder and self.is_global_zero:
            remove(path)
        return was_folder

    def _check_checkpoint_io(self) -> None:
        """Refuses a plug-in that folders would go past.

        Raises:
            ValueError: If there is one.
        """
        if self._saves_folders and not isinstance(self.checkpoint_io, TorchCheckpointIO):
            raise ValueError(
                "save_distributed_checkpoint=True writes folders itself and would not use"
                f" {type(self.checkpoint_io).__name__}; leave out one of them."
            )
