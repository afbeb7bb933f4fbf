"""Checkpoints in files: a killed process leaves the one before whole; strange ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from typing_extensions import override

from lightning_dear.checkpoint import folder
from lightning_dear.checkpoint.files import (
    CHECKPOINT_KEY,
    CheckpointError,
    forget_masters,
    read,
    write,
)
from lightning_dear.collectives.store import from_all_ranks


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

        A writer that was killed leaves a file `.writing-...` behind, which the next save to the
        same name removes.

        Raises:
            TypeError: If `storage_options` are given, which files on disk do not have.
            OSError: If it cannot be written, with the system's reason. Nothing is left of it then.
        """
        if storage_options is None and isinstance(get_filesystem(path), LocalFileSystem):
            write(checkpoint, Path(LocalFileSystem._strip_protocol(str(path))))
        else:
            super().save_checkpoint(checkpoint, path, storage_options)


def checked(
    load: Callable[[], dict[str, Any]],
    path: str | Path,
    *,
    check_digests: bool,
    weights_only: bool | None = None,
    is_trainers: bool = False,
) -> dict[str, Any]:
    """Returns the checkpoint in `path`, without masters if another strategy wrote it.

    Every rank reads: where it fails on any rank, it fails on all. Hosts may have copies of their
    own: without that others would wait for the one that failed. Collective, blocks.

    Args:
        load: Reads the file; called once.
        path: To be named, and compared with its digests where it is local.
        check_digests: Whether to compare.
        weights_only: Of a folder: see `folder.load`.
        is_trainers: Whether a Trainer must have written it.

    Raises:
        ValueError: If it is damaged or no checkpoint, or a later version of this package wrote it.
            If it was so on other ranks alone, with the first one's words.
        Exception: What else `load` has raised here.
    """
    wrong: Exception | None = None
    try:
        if folder.is_folder(path):
            checkpoint = folder.load(path, weights_only=weights_only, check_digests=check_digests)
        else:
            local = str(path).removeprefix("file://")
            checkpoint = read(local, load, check_digests=check_digests)
        if is_trainers and "state_dict" not in checkpoint:
            raise CheckpointError(f"{path} is no Trainer's checkpoint: no 'state_dict'.")
    except Exception as error:
        wrong = error
    said = from_all_ranks(None if wrong is None else str(wrong) or repr(wrong))
    if wrong is not None:
        raise wrong
    for others in filter(None, said):
        raise CheckpointError(others)
    if CHECKPOINT_KEY not in checkpoint:
        forget_masters(checkpoint)
    return checkpoint
