"""Checkpoints as folders into which every rank writes its own pieces; nobody gathers the state.

    python -m lightning_dear.checkpoint.folder FOLDER FILE

makes an ordinary checkpoint file of a folder, for DDP, a single device or `torch.load`.

The folder holds the tensors as torch.distributed.checkpoint writes them, and `checkpoint.pt`:
everything else, with names in place of tensors, and where these are. torch's own `.metadata` is
written for others, and not read: it is a pickle that may run code.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from lightning_dear.checkpoint import files

SKELETON_FILE = "checkpoint.pt"
"""What is no large tensor; written by rank 0."""


def save(path: str | Path, checkpoint: Mapping[str, Any]) -> None:
    """Writes `checkpoint` to the folder `path`, every rank its part. Collective, blocks.

    Rank 0 writes what all ranks have, except that the optimizers' parameters are spread over the
    ranks, and each rank its chunks of every `ShardedState`. Nobody holds more than its share and
    one chunk. The folder appears under its name when it is complete; a file or folder of that name
    is replaced then, not before. Runs on the default process group, with its timeout.

    Args:
        path: Equal on all ranks, on storage that all ranks share.
        checkpoint: Lightning's ordinary dict; its `optimizer_states` may be `ShardedState`.

    Raises:
        ValueError: If `path` is no local path.
        CheckpointException: On all ranks, if writing failed on any; it says why, and names `path`.
            Nothing of it is left then.
    """
    # Here, because torch.distributed.checkpoint takes long to import and few write folders.
    from lightning_dear.checkpoint.storage import FilePlace, take_apart, write_tensors

    target = _local(path)
    skeleton, tensors = take_apart(checkpoint)
    folder = files.beside(target, "saving")

    def finish(places: list[FilePlace]) -> None:
        stand_ins = {name: stored.stand_in for name, stored in tensors.items()}
        file: dict[str, Any] = {"checkpoint": skeleton, "tensors": stand_ins, "places": places}
        files.stamp(file)
        files.write(file, folder / SKELETON_FILE)
        _publish(folder, target)

    write_tensors(folder, tensors, finish, target)


def load(
    path: str | Path, *, weights_only: bool | None = None, check_digests: bool = True
) -> dict[str, Any]:
    """Returns the ordinary checkpoint dict, with whole tensors on the CPU. Local.

    Any process may call, in any world or in none. Needs memory for the result and two chunks.

    Args:
        path: A folder that `save` has written.
        weights_only: As in `torch.load`, whose default is None: True unless an environment variable
            says otherwise. False lets the checkpoint run code of its own.
        check_digests: Whether all bytes must be those that were written.

    Raises:
        FileNotFoundError: If there is no such folder.
        ValueError: If it is incomplete, damaged, or of an unknown format; it names the file.
        UnpicklingError: If `weights_only` refuses what is in it.
    """
    from lightning_dear.checkpoint.storage import put_together, read_tensors

    folder = _existing(path)
    for name in (files.METADATA_FILE, SKELETON_FILE):
        if not (folder / name).is_file():
            raise files.CheckpointError(
                f"{folder} is not a complete checkpoint folder ({name} is missing): saving or"
                " removing it was interrupted, or something else wrote it. Use an earlier one."
            )
    path = folder / SKELETON_FILE
    skeleton = partial(torch.load, path, map_location="cpu", weights_only=weights_only)
    file = files.read(path, skeleton, check_digests=check_digests)

    def whole() -> Any:
        tensors = read_tensors(folder, file["tensors"], file["places"], check_digests)
        return put_together(file["checkpoint"], tensors)

    return files.read(folder, whole, check_digests=False)


def is_folder(path: str | Path) -> bool:
    """Tells whether `load` reads `path`: it is a folder, or was just being replaced."""
    path = Path(path)
    return path.is_dir() or (not path.exists() and files.beside(path, "replaced").is_dir())


def remove(path: str | Path) -> None:
    """Removes a checkpoint folder, so that what a kill leaves of it does not look complete."""
    folder = Path(path)
    # Of a link only the link goes: what it points to is another checkpoint.
    if not folder.is_symlink():
        (folder / files.METADATA_FILE).unlink(missing_ok=True)
    files.delete(folder)
    files.delete(files.beside(folder, "replaced"))


def convert(folder: str | Path, file: str | Path, *, weights_only: bool | None = None) -> None:
    """Writes the ordinary checkpoint file of a folder; needs memory for the whole checkpoint.

    Args:
        folder: That `save` has written.
        file: Must not exist; appears when it is complete.
        weights_only: As in `load`.

    Raises:
        FileExistsError: If `file` exists.
    """
    target = _local(file)
    if target.exists():
        raise FileExistsError(f"{target} exists; remove it or name another file.")
    files.write(load(folder, weights_only=weights_only), target)


def _publish(folder: Path, target: Path) -> None:
    replaced = files.beside(target, "replaced")
    # Moved aside, not removed: a kill at any moment leaves the old one or the new one whole.
    if os.path.lexists(target):
        # If `target` is not there, a save was killed between the two renames and this is the last.
        files.delete(replaced)
        target.rename(replaced)
    folder.rename(target)
    files.delete(replaced)


def _existing(path: str | Path) -> Path:
    folder = _local(path)
    if not is_folder(folder):
        raise FileNotFoundError(f"{folder} is not a folder; nothing to load.")
    if folder.is_dir():
        return folder
    replaced = files.beside(folder, "replaced")
    warnings.warn(
        f"{folder} was being replaced when its process was killed; loading the one before it, which"
        f" is still there as {replaced.name}.",
        stacklevel=3,
    )
    return replaced


def _local(path: str | Path) -> Path:
    if "://" in str(path):
        raise ValueError(
            f"Checkpoint folders are written and read through the file system, not at '{path}':"
            " give a path that all hosts have mounted, or leave out"
            " save_distributed_checkpoint=True."
        )
    return Path(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command: it turns a checkpoint folder into an ordinary checkpoint file."""
    parser = argparse.ArgumentParser(
        prog="python -m lightning_dear.checkpoint.folder",
        description="Make an ordinary checkpoint file of a checkpoint folder.",
    )
    parser.add_argument("folder", help="written with save_distributed_checkpoint=True")
    parser.add_argument("file", help="to write; must not exist")
    parser.add_argument(
        "--trusted",
        action="store_true",
        help="load with weights_only=False: only for folders from a trusted source",
    )
    given = parser.parse_args(arguments)
    try:
        convert(given.folder, given.file, weights_only=False if given.trusted else None)
    except (OSError, ValueError, UnpicklingError) as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
