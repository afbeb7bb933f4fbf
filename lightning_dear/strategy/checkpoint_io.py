"""Checkpoints in files: a killed process leaves the one before whole; strange ones are refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from typing_extensions import override

from lightning_dear.checkpoint.format import KEY, check, forget_masters


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the file, in its own folder, and renames when all is on the disk.

    Lightning's own writes to the system's temporary folder and moves; between two file systems a
    move is a copy, and a process killed in its midst leaves half a file where a whole one was.
    Paths that are not local are written as Lightning does.
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Writes `checkpoint` to `path`. Blocks until it is on the disk.

        A writer that was killed leaves `.NAME.partial` behind, which the next save to the same
        name overwrites.

        Raises:
            TypeError: If `storage_options` are given, which files on disk do not have.
        """
        file_system = get_filesystem(path)
        if storage_options is not None or not isinstance(file_system, LocalFileSystem):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(LocalFileSystem._strip_protocol(str(path)))
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.partial")
        try:
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def checked(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The same, as it was read from a file, without masters if another strategy wrote it.

    Raises:
        ValueError: If a later version of this package wrote it.
    """
    check(checkpoint)
    if KEY not in checkpoint:
        forget_masters(checkpoint)
    return checkpoint
