"""Saves and loads checkpoint folders, into which every rank writes its own part of the state.

No rank gathers the whole optimizer state. The command

    python -m lightning_dear.checkpoint.folder FOLDER FILE

converts a folder to an ordinary checkpoint file, for DDP, a single device or `torch.load`.

A folder holds the tensors, in the file format of torch.distributed.checkpoint, and
`checkpoint.pt`. The latter holds the rest of the checkpoint, with a name in place of each tensor,
and says in which files the tensors are. torch's own `.metadata` is written for other readers. Here
only its presence is checked. It is never read, since it is a pickle that may run code.
"""

import argparse
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_dear.checkpoint import files

SKELETON_FILE = "checkpoint.pt"
"""Name of the file that holds the checkpoint without its large tensors. Rank 0 writes it when all
ranks have written their tensors."""


def save(path: str | Path, checkpoint: Mapping[str, Any]) -> None:
    """Writes `checkpoint` to the folder `path`, each rank a part of it. Collective. Blocks.

    Each rank writes its own chunks of every `ShardedState`. All ranks hold the optimizers'
    parameters, and each rank writes some of them. Rank 0 writes the rest. Beside its own state a
    rank needs memory for one chunk.

    The folder is written under a temporary name, and rank 0 renames it when it is complete. Only
    then is a file or folder that had the name `path` replaced. Runs on the default process group
    with its timeout, or without a group in a training of one rank.

    Args:
        path: Path of the folder, equal on all ranks, on storage that all ranks share.
        checkpoint: Lightning's checkpoint dict. Dicts in it may be `ShardedState`. Names of tensors
            that only one rank writes must be rank 0's, too, with stand-ins.

    Raises:
        ValueError: If `path` is a URL, or if a tensor is on the meta device and is not a stand-in
            of a `ShardedState`.
        CheckpointException: On all ranks, if writing failed on any rank. It names the cause and
            `path`. What was written so far has been removed.
    """
    # Imported here, because torch.distributed.checkpoint is slow to import and few trainings
    # write folders.
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
    path: str | Path,
    *,
    weights_only: bool | None = None,
    check_digests: bool = True,
    reader: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Returns the checkpoint dict of a folder, with whole tensors on the CPU. Local.

    Works in any process, with or without a process group. Needs memory for the result and two
    chunks. If a save was killed while it replaced the folder, this warns and loads the checkpoint
    that the save was to replace.

    Args:
        path: Folder that `save` has written.
        weights_only: Same as the argument of `torch.load`. None means True, unless an environment
            variable of torch says otherwise. False lets the checkpoint run code of its own.
        check_digests: Whether to compare all bytes with the digests that were written. Without it a
            changed byte may go unnoticed.
        reader: Rank that reads, and number of ranks. With local steps it also gets its own state
            (`files.LOCAL_KEY`) if as many ranks have saved. None means without that.

    Raises:
        FileNotFoundError: If the folder does not exist.
        ValueError: If the folder is incomplete, damaged, or of an unknown format. The message
            names the file.
        UnpicklingError: If `weights_only` forbids to load an object in the folder.
    """
    from lightning_dear.checkpoint.storage import put_together, read_tensors

    folder = _existing(path)
    for name in (files.METADATA_FILE, SKELETON_FILE):
        if not (folder / name).is_file():
            raise files.CheckpointError(
                f"{folder} is not a complete checkpoint folder ({name} is missing). Use an earlier"
                " one: saving or removing it was interrupted, or another program wrote it."
            )
    path = folder / SKELETON_FILE
    skeleton = partial(torch.load, path, map_location="cpu", weights_only=weights_only)
    file = files.read(path, skeleton, check_digests=check_digests)

    def whole() -> Any:
        stand_ins = _wanted(file["checkpoint"], file["tensors"], reader)
        tensors = read_tensors(folder, stand_ins, file["places"], check_digests)
        return put_together(file["checkpoint"], tensors)

    return files.read(folder, whole, check_digests=False)


def _wanted(
    skeleton: Any, stand_ins: Mapping[str, Tensor], reader: tuple[int, int] | None
) -> Mapping[str, Tensor]:
    """Returns the stand-ins of tensors to read: without local state that is not the reader's.

    Mutates `skeleton`, which gets no names of other tensors.
    """
    own = skeleton.get(files.CHECKPOINT_KEY, {})
    if (local := own.get(files.LOCAL_KEY)) is None:
        return stand_ins
    prefix = f"{files.CHECKPOINT_KEY}.{files.LOCAL_KEY}."
    if reader is None or len(local["ranks"]) != reader[1]:
        del own[files.LOCAL_KEY]
        return {name: one for name, one in stand_ins.items() if not name.startswith(prefix)}
    rank, prefix = reader[0], f"{prefix}ranks."
    local["ranks"] = {rank: local["ranks"][rank]}
    ours = (prefix, f"{prefix}{rank}.")
    return {
        name: one
        for name, one in stand_ins.items()
        if not name.startswith(ours[0]) or name.startswith(ours[1])
    }


def is_folder(path: str | Path) -> bool:
    """Tells whether `path` names a checkpoint folder, not a file. Does not look into the folder.

    True if `path` is a folder. Also true if nothing is there, but a save that was replacing a
    folder `path` was killed: `load` then reads the replaced folder, which has a temporary name.
    """
    path = Path(path)
    return path.is_dir() or (not path.exists() and files.beside(path, "replaced").is_dir())


def remove(path: str | Path) -> None:
    """Removes a checkpoint folder, and a replaced one that a killed save has left beside it. Local.

    The metadata file is removed first: if the process is killed meanwhile, `load` refuses what is
    left of the folder. If `path` is a symbolic link, only the link is removed.
    """
    folder = Path(path)
    # The folder that a link points to is another checkpoint and must stay complete.
    if not folder.is_symlink():
        (folder / files.METADATA_FILE).unlink(missing_ok=True)
    files.delete(folder)
    files.delete(files.beside(folder, "replaced"))


def convert(folder: str | Path, file: str | Path, *, weights_only: bool | None = None) -> None:
    """Converts a checkpoint folder to an ordinary checkpoint file. Local.

    Needs memory for the whole checkpoint.

    Args:
        folder: Folder that `save` has written.
        file: Path of the file to write. It must not exist. The file gets this name only when it is
            complete.
        weights_only: Same as the argument of `load`.

    Raises:
        FileExistsError: If `file` exists.
        Exception: All that `load` and `files.write` raise.
    """
    if (target := _local(file)).exists():
        raise FileExistsError(f"{target} exists already. Remove it or name another file.")
    files.write(load(folder, weights_only=weights_only), target)


@contextmanager
def making_way(path: str | Path | None) -> Iterator[None]:
    """A context that puts a new checkpoint in the place of a folder `path`, if there is one. Local.

    The old checkpoint is renamed first and removed last, so that a kill at any moment leaves either
    the old or the new checkpoint complete.

    Args:
        path: Path of the new checkpoint. None means that nothing is done.

    Raises:
        IsADirectoryError: If `path` is a directory with other files. It is left as it is.
    """
    if path is None or not is_folder(path):
        yield
        return
    target, replaced = Path(path), files.beside(Path(path), "replaced")
    if target.is_dir():
        held = [one.name for one in target.iterdir()]
        if held and not any(name == SKELETON_FILE or name.endswith(".distcp") for name in held):
            raise IsADirectoryError(
                f"{target} is a directory with other files, such as '{held[0]}'. Give another path:"
                " a checkpoint takes the place of what has its name."
            )
        # If `target` is missing, a save was killed between the two renames. Then `replaced` is the
        # last complete checkpoint, and must stay until the new one has its name.
        files.delete(replaced)
        target.rename(replaced)
    yield
    files.delete(replaced)


def _publish(folder: Path, target: Path) -> None:
    """Renames the complete `folder` to `target`. Runs on rank 0."""
    with making_way(target):
        target.unlink(missing_ok=True)
        folder.rename(target)


def _existing(path: str | Path) -> Path:
    if not is_folder(folder := _local(path)):
        raise FileNotFoundError(f"{folder} is not a folder. Name an existing checkpoint folder.")
    if folder.is_dir():
        return folder
    replaced = files.beside(folder, "replaced")
    warnings.warn(
        f"{folder} was being replaced when its process was killed. The checkpoint before it, which"
        f" is still there as {replaced.name}, is loaded instead.",
        stacklevel=3,
    )
    return replaced


def _local(path: str | Path) -> Path:
    if "://" in str(path):
        raise ValueError(
            f"A checkpoint folder must be in the file system, not at '{path}'. Give a path on"
            " storage that all hosts have mounted, or leave out save_distributed_checkpoint=True."
        )
    return Path(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command of this module, which converts a checkpoint folder to a checkpoint file.

    If that fails, the process exits with code 1 and prints the message of the error.

    Args:
        arguments: Command-line arguments. None means those of this process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m lightning_dear.checkpoint.folder",
        description="Convert a checkpoint folder to an ordinary checkpoint file.",
    )
    parser.add_argument("folder", help="folder written with save_distributed_checkpoint=True")
    parser.add_argument("file", help="file to write; it must not exist")
    files.run_command(
        parser, arguments, lambda given, only: convert(given.folder, given.file, weights_only=only)
    )


if __name__ == "__main__":
    main()
