"""Writes checkpoint files atomically, and checks that a file holds the bytes that were written.

The strategies write a format number into their checkpoints (`stamp`), so that an older version of
the package can refuse a checkpoint that it would read wrongly.

torch.save writes a zip archive that states the CRC-32 of each of its records. torch.load does not
compare these digests with the data, so `check_records` does.
"""

import hashlib
import os
import shutil
import zipfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import torch

from lightning_dear.optimizers.masters import MASTER_KEY

CHECKPOINT_KEY = "lightning_dear"
"""Key of a checkpoint dict. Its value is a dict that only this package reads, with the format
number under "format"."""

LOCAL_KEY = "local_state"
"""Key under `CHECKPOINT_KEY`, in folders of local steps: a dict with the state of all ranks. Its
entry "ranks" is a dict: rank -> what only that rank reads. `folder.load` leaves out the others."""

FORMAT = 1
"""Format number of the checkpoints that this version writes. It is raised whenever older versions
would read a new checkpoint wrongly."""

METADATA_FILE = ".metadata"
"""Name of the file that torch.distributed.checkpoint writes after all tensors. `folder.load`
refuses a folder without it as incomplete."""


class CheckpointError(ValueError):
    """Raised for a checkpoint that cannot be loaded. Its message is one line for the user.

    Args:
        message: What is wrong. Characters that cannot be printed, such as line breaks, are escaped,
            since parts of the message may come from a damaged file.
    """

    def __init__(self, message: str) -> None:
        super().__init__("".join(c if c.isprintable() else repr(c)[1:-1] for c in message))


# --- the format number, and state that only this package can read ---------------------------------


def stamp(checkpoint: dict[str, Any]) -> None:
    """Writes the format number into `checkpoint`, under `CHECKPOINT_KEY`. Mutates `checkpoint`.

    Other entries of the dict under that key are kept.
    """
    checkpoint[CHECKPOINT_KEY] = {**checkpoint.get(CHECKPOINT_KEY, {}), "format": FORMAT}


def check_format(checkpoint: Mapping[str, Any]) -> None:
    """Raises if `checkpoint` has another format number than `FORMAT`.

    A checkpoint without `CHECKPOINT_KEY` passes: another strategy, such as DDP, wrote it.

    Raises:
        ValueError: If the format number is another one, or is missing under `CHECKPOINT_KEY`. The
            message names it and says what to do.
    """
    own = checkpoint.get(CHECKPOINT_KEY, {"format": FORMAT})
    number = own.get("format") if isinstance(own, Mapping) else None
    if number == FORMAT and not isinstance(number, bool):
        return
    advice = "Load it with the version of lightning-dear that wrote it"
    if isinstance(number, int) and number > FORMAT:
        advice = "A newer version wrote it: upgrade with `pip install -U lightning-dear`"
    raise ValueError(
        f"The checkpoint has lightning_dear format {number!r}, and this version reads {FORMAT}."
        f" {advice}. Or load it as a checkpoint of DDP, which loses fp32 masters of 16-bit weights:"
        f" torch.load the file, del checkpoint['{CHECKPOINT_KEY}'], and torch.save it."
    )


def forget_masters(checkpoint: Mapping[str, Any]) -> None:
    """Deletes the fp32 masters from the optimizer states in `checkpoint`. Mutates those states.

    For a checkpoint that another strategy wrote after it had loaded one of this package. That
    strategy stepped the weights. It saved the masters unchanged, as it saves all optimizer state
    that it does not know, so that the masters are older than the weights.

    Args:
        checkpoint: Checkpoint dict. Every value, and every item of a value that is a list, is taken
            for an optimizer state if it has the keys "state" and "param_groups".
    """
    for value in checkpoint.values():
        for state in value if isinstance(value, list) else [value]:
            if isinstance(state, Mapping) and {"state", "param_groups"} <= state.keys():
                for own in state["state"].values():
                    if isinstance(own, dict):
                        own.pop(MASTER_KEY, None)


# --- writing --------------------------------------------------------------------------------------


def write(value: Any, target: Path, save: Callable[[Any, IO[bytes]], object] | None = None) -> None:
    """Writes `value` to a temporary file that is then renamed. Local. Blocks.

    The file gets the name `target` only when all data is on the disk. Until then a file that had
    this name before is still there. A temporary file that a killed call for the same path has left
    behind is overwritten and removed. Missing parent folders are made.

    Args:
        value: What to write.
        target: Path of the file.
        save: Writes `value` to a stream. None means torch.save.

    Raises:
        OSError: If writing fails, for instance since the disk is full. The error has the system's
            error number and names `target`. A file that `target` named before is still there, and
            the temporary file is removed.
    """
    unfinished = beside(target, "writing")
    with naming(target):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with unfinished.open("wb") as file:
                (save or torch.save)(value, file)
                file.flush()
                # Synced before the rename: otherwise a crash of the machine could leave a file
                # that has its final name and lacks its data.
                os.fsync(file.fileno())
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Generator[None, None, None]:
    """A context in which a failed write raises an OSError with the system's reason and `path`.

    torch's own error has neither.

    Raises:
        OSError: Instead of an OSError that the block raised, or of torch's RuntimeError "enforce
            fail" that followed an OSError. Other exceptions pass unchanged.
    """
    try:
        yield
    except Exception as error:
        # `__context__` is read only of torch's "enforce fail" error: in any other exception it may
        # be an earlier failure, unrelated to this write.
        errors = (error, error.__context__ if "enforce fail" in str(error) else None)
        cause = next((one for one in errors if isinstance(one, OSError)), None)
        if cause is None:
            raise
        raise OSError(cause.errno, cause.strerror or str(cause), str(path)) from error


def beside(path: str | Path, what: str) -> Path:
    """Returns the path of a hidden temporary file or folder in the folder of `path`.

    Creates nothing. The result depends only on the arguments, so that a later save to `path` finds
    what a killed one has left. The name holds a hash of the file name instead of the file name:
    Lightning takes every file with "last" in its name for a last checkpoint.

    Args:
        path: The checkpoint that the temporary file or folder belongs to.
        what: First word of the name, such as "writing".
    """
    path = Path(path)
    return path.with_name(f".{what}-{hashlib.sha256(path.name.encode()).hexdigest()[:12]}")


def delete(path: Path) -> None:
    """Removes a file, a folder with its content, or a link. Does nothing if `path` is not there.

    What a link points to is kept.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# --- commands -------------------------------------------------------------------------------------


def run_command(
    parser: ArgumentParser,
    arguments: Sequence[str] | None,
    act: Callable[[Namespace, bool | None], object],
) -> None:
    """Runs a command that loads a checkpoint. If it fails, the process exits with 1 and a message.

    Args:
        parser: Its arguments, to which `--trusted` is added.
        arguments: Command-line arguments. None means those of this process.
        act: Gets what was given, and `weights_only` of `torch.load`.
    """
    parser.add_argument(
        "--trusted",
        action="store_true",
        help="load with weights_only=False: only for checkpoints from a trusted source",
    )
    given = parser.parse_args(arguments)
    try:
        act(given, False if given.trusted else None)
    except UnpicklingError as error:
        parser.exit(1, f"{error}\nIf you trust the checkpoint's source, pass --trusted.\n")
    except (ImportError, OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")


# --- reading --------------------------------------------------------------------------------------


def read(path: str | Path, load: Callable[[], Any], *, check_digests: bool) -> dict[str, Any]:
    """Returns the checkpoint dict that `load` reads from `path`, and checks its format number.

    Local.

    Args:
        path: File or folder, for error messages and for `check_digests`.
        load: Reads the checkpoint, for instance with torch.load.
        check_digests: Whether to run `check_records` first, if `path` is a file on this machine.
            That reads the file once more. Without it a changed byte may go unnoticed.

    Raises:
        ValueError: If the checkpoint is empty, cut off, damaged, not a checkpoint at all, or of an
            unknown format. This includes every other exception of `load`.
        UnpicklingError: If `load` refuses to run code that the file names. The file is a zip
            archive, as torch.save writes it, so that it is probably not damaged.
        FileNotFoundError, PermissionError, MemoryError: As `load` has raised them.
    """
    try:
        if check_digests and Path(path).is_file():
            with Path(path).open("rb") as file:
                check_records(file, path)
        if not isinstance(content := load(), dict):
            raise TypeError(f"it holds a {type(content).__name__}")
    except (CheckpointError, FileNotFoundError, PermissionError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, UnpicklingError) and zipfile.is_zipfile(path):
            raise UnpicklingError(f"{path}: {error}") from error
        # Cuts off torch's advice to set weights_only=False, which would not help with a damaged
        # file.
        cause = f"{type(error).__name__}: {error}".splitlines()[0].partition(" In PyTorch ")[0]
        raise CheckpointError(
            f"{path} cannot be loaded ({cause}). Copy it again, or use another checkpoint: it is"
            " empty, cut off, damaged or no checkpoint, unless the brackets name another reason."
        ) from error
    check_format(content)
    return content


def check_records(file: IO[bytes], path: str | Path, name: str | None = None) -> None:
    """Compares the bytes of a torch.save archive with the CRC-32 digests in the archive.

    Nothing is checked if `file` is no zip archive, as with torch older than 1.6. If the archive has
    no digests (`torch.serialization.set_crc32_options(False)` was in effect), its data is not
    compared. Only a record with the flag of a folder is found then.

    Args:
        file: Binary stream of the archive. It is read, and left at its start unless this raises.
        path: Path of the file, for the error message.
        name: Name of the tensor in the archive, for the error message. None means that the message
            names the record of the archive.

    Raises:
        ValueError: If a record differs or has the flag of a folder. The message names the file, and
            `name` or the first such record.
    """
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            has_digests = any(record.CRC for record in archive.infolist())
            # 16 is the flag of a folder, which torch.save never sets. For a record whose damaged
            # flags say folder, torch.load would silently read no data.
            folders = (one.filename for one in archive.infolist() if one.external_attr & 16)
            changed = next(folders, archive.testzip() if has_digests else None)
        if changed is not None:
            raise CheckpointError(
                f"{path} is damaged: {name or changed} is not what was written. Copy it again, or"
                " use another. To load it all the same, set check_digests=False on the strategy."
            )
    file.seek(0)
