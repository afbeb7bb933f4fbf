"""Writes checkpoint files atomically, and reads checkpoints with checks on all ranks."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from typing_extensions import override

from lightning_dear.checkpoint import files, folder
from lightning_dear.collectives.store import from_all_ranks


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes each checkpoint to a temporary file in the same folder, then renames that file.

    If the process is killed meanwhile, an earlier checkpoint of that name is still complete.
    Lightning's own plug-in writes to the system's temporary folder and moves the file. Between two
    file systems a move is a copy, and a killed copy leaves half a file. Paths that are not local
    are written by Lightning's plug-in, not atomically.
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Writes `checkpoint` to `path`. Local. Blocks until it is on the disk.

        A killed process leaves a file `.writing-...` behind, which the next save to the same path
        removes.

        Raises:
            TypeError: If `storage_options` are given, which this plug-in does not support.
            OSError: If writing fails, with the system's reason. The temporary file is removed, and
                an earlier file `path` is kept.
        """
        if storage_options is None and isinstance(get_filesystem(path), LocalFileSystem):
            files.write(checkpoint, Path(LocalFileSystem._strip_protocol(str(path))))
        else:
            super().save_checkpoint(checkpoint, path, storage_options)


def save_folder(checkpoint: dict[str, Any], path: str | Path, storage_options: Any) -> None:
    """Writes a checkpoint as a folder, into which every rank writes. Collective. Blocks.

    Args:
        checkpoint: The checkpoint.
        path: The folder, the same on all ranks.
        storage_options: Must be None.

    Raises:
        TypeError: If `storage_options` are given.
    """
    if storage_options is not None:
        raise TypeError(
            "save_distributed_checkpoint=True writes through the file system and knows no"
            " storage_options. Leave out one of them."
        )
    folder.save(path, checkpoint)


def checked(
    load: Callable[[], dict[str, Any]],
    path: str | Path,
    *,
    check_digests: bool,
    weights_only: bool | None = None,
    is_trainers: bool = False,
    reader: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Returns the checkpoint in `path`, without masters if another strategy wrote it.

    Collective. Blocks. Every rank reads. If reading fails on one rank, all ranks raise: each host
    may have its own copy of the file, and the other ranks would wait for the rank that failed.

    Args:
        load: Reads the file. It is not called for a folder.
        path: File or folder. It is named in error messages.
        check_digests: Whether to compare local files with the digests in them.
        weights_only: For a folder, the argument of `folder.load`.
        is_trainers: Whether to refuse a checkpoint without "state_dict", which no Trainer wrote.
        reader: For a folder, the argument of `folder.load`.

    Raises:
        ValueError: If the checkpoint is damaged or no checkpoint, or has another format number. If
            reading failed on other ranks only, with the message of the first of them.
        Exception: What else `folder.load` or `files.read` raised on this rank, for instance
            FileNotFoundError.
    """
    wrong: Exception | None = None
    try:
        if folder.is_folder(path):
            how = partial(folder.load, path, check_digests=check_digests, reader=reader)
            checkpoint = how(weights_only=weights_only)
        else:
            local = str(path).removeprefix("file://")
            checkpoint = files.read(local, load, check_digests=check_digests)
        if is_trainers and "state_dict" not in checkpoint:
            raise files.CheckpointError(
                f"{path} is no Trainer's checkpoint (no 'state_dict'). Load it with torch.load."
            )
    except Exception as error:
        wrong = error
    said = from_all_ranks(None if wrong is None else str(wrong) or repr(wrong))
    if wrong is not None:
        raise wrong
    for others in filter(None, said):
        raise files.CheckpointError(others)
    if files.CHECKPOINT_KEY not in checkpoint:
        files.forget_masters(checkpoint)
    return checkpoint
