"""Files of checkpoints: written whole or not at all, and read only as they were written.

A format number marks a checkpoint as ours, so that a later one can be refused.

torch.save writes a zip archive, which states the CRC-32 of each of its records: those are the
digests. torch.load does not compare them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import torch

from lightning_dear.optimizers.masters import MASTER_KEY

CHECKPOINT_KEY = "lightning_dear"
"""Under which a checkpoint holds what only this package reads."""

FORMAT = 1
"""Of what is written now. Grows when what older versions would read wrongly is written."""

METADATA_FILE = ".metadata"
"""torch.distributed.checkpoint's own; a folder without it is not a complete checkpoint."""


class CheckpointError(ValueError):
    """Says what is wrong with a checkpoint, in words for people, on one line."""

    def __init__(self, said: str) -> None:
        super().__init__("".join(c if c.isprintable() else repr(c)[1:-1] for c in said))


# --- what marks a checkpoint ----------------------------------------------------------------------


def stamp(checkpoint: dict[str, Any]) -> None:
    """Writes the format number into `checkpoint`, under `CHECKPOINT_KEY`."""
    checkpoint[CHECKPOINT_KEY] = {**checkpoint.get(CHECKPOINT_KEY, {}), "format": FORMAT}


def check_format(checkpoint: Mapping[str, Any]) -> None:
    """Refuses a checkpoint that this version cannot read.

    A checkpoint without `CHECKPOINT_KEY` is DDP's and can be read.

    Raises:
        ValueError: Naming the format number and what to do.
    """
    own = checkpoint.get(CHECKPOINT_KEY, {"format": FORMAT})
    number = own.get("format") if isinstance(own, Mapping) else None
    if number == FORMAT and not isinstance(number, bool):
        return
    advice = "Load it with the version of lightning-dear that wrote it"
    if isinstance(number, int) and number > FORMAT:
        advice = "A newer lightning-dear wrote it: upgrade this one (pip install -U lightning-dear)"
    raise ValueError(
        f"The checkpoint has lightning_dear format {number!r}; this version reads {FORMAT}."
        f" {advice}, or drop checkpoint['{CHECKPOINT_KEY}'] to load it as DDP's own."
    )


def forget_masters(checkpoint: Mapping[str, Any]) -> None:
    """Drops masters from the optimizers' states in `checkpoint`, which another strategy wrote.

    It has stepped the weights, and kept the masters as it keeps all state that it does not know.
    """
    for value in checkpoint.values():
        for state in value if isinstance(value, list) else [value]:
            if isinstance(state, Mapping) and {"state", "param_groups"} <= state.keys():
                for own in state["state"].values():
                    if isinstance(own, dict):
                        own.pop(MASTER_KEY, None)


# --- writing --------------------------------------------------------------------------------------


def write(value: object, target: Path) -> None:
    """Writes `value` with torch.save; `target` appears when all is on the disk. Blocks.

    What a killed call for the same path has left behind goes with it.

    Raises:
        OSError: With its number and `target`, for instance since the disk is full. What was there
            before is still there, and nothing else.
    """
    unfinished = beside(target, "writing")
    with naming(target):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with unfinished.open("wb") as file:
                torch.save(value, file)
                file.flush()
                # Before it gets its name, or a crash could leave a name without data.
                os.fsync(file.fileno())
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Generator[None, None, None]:
    """Lets a failed write in the block tell the system's reason and `path`; torch tells neither.

    Raises:
        OSError: In the place of the one that was raised, or that led to what was raised.
    """
    try:
        yield
    except Exception as error:
        # What else has failed before this save is none of its causes.
        causes = (error, error.__context__ if "enforce fail" in str(error) else None)
        cause = next((one for one in causes if isinstance(one, OSError)), None)
        if cause is None:
            raise
        raise OSError(cause.errno, cause.strerror or str(cause), str(path)) from error


def beside(path: str | Path, what: str) -> Path:
    """Returns a name in the same folder that depends on `path` and has none of its letters.

    Lightning takes whatever has "last" in its name for a last checkpoint.
    """
    path = Path(path)
    return path.with_name(f".{what}-{hashlib.sha256(path.name.encode()).hexdigest()[:12]}")


def delete(path: Path) -> None:
    """Removes a file, a folder with all that is in it, or a link; nothing need be there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# --- reading --------------------------------------------------------------------------------------


def read(path: str | Path, load: Callable[[], Any], *, check_digests: bool) -> dict[str, Any]:
    """Returns the dict that `load` makes of the file or folder `path`.

    Args:
        path: To be named with whatever `load` raises, in one sentence.
        load: Reads it, for instance with torch.load.
        check_digests: See `check_records`, of a file on this machine. Costs one more reading.

    Raises:
        ValueError: If it is empty, cut off, damaged, no checkpoint, or of a later version of this
            package.
        UnpicklingError: If it is whole, but `load` refuses to run what it names.
    """
    try:
        if check_digests and Path(path).is_file():
            with Path(path).open("rb") as file:
                check_records(file, path)
        content = load()
        if not isinstance(content, dict):
            raise TypeError(f"it holds a {type(content).__name__}")
    except (CheckpointError, FileNotFoundError, PermissionError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, UnpicklingError) and zipfile.is_zipfile(path):
            raise UnpicklingError(f"{path}: {error}") from error
        # Without torch's advice to load with weights_only=False, which is for other cases.
        said = f"{type(error).__name__}: {error}".splitlines()[0].partition(" In PyTorch ")[0]
        raise CheckpointError(
            f"{path} cannot be loaded ({said}). Unless that says more, it is empty,"
            " cut off, damaged or no checkpoint: copy it again, or use another."
        ) from error
    check_format(content)
    return content


def check_records(file: IO[bytes], path: str | Path, name: str | None = None) -> None:
    """Compares all bytes that torch.save has written with the digests that it has written.

    Where there are none (`torch.serialization.set_crc32_options(False)`, or torch before 1.6)
    nothing is compared.

    Args:
        file: Or the part of one that torch.save has written; read, and left at its start.
        path: Of the file, to be named.
        name: Of the tensor in it; None: the archive's record is named.

    Raises:
        ValueError: Naming the file, and what in it has changed first.
    """
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            stated = any(record.CRC for record in archive.infolist())
            # Of a record with the flag of a folder torch reads nothing, and says nothing.
            folders = (one.filename for one in archive.infolist() if one.external_attr & 16)
            changed = next(folders, archive.testzip() if stated else None)
        if changed is not None:
            raise CheckpointError(
                f"{path} is damaged: {name or changed} is not what was written. Copy it again, or"
                " use an earlier checkpoint; check_digests=False loads it all the same."
            )
    file.seek(0)
