"""Writes the weights of a checkpoint to a safetensors file, for others, and reads such files.

    python -m lightning_dear.checkpoint.weights CHECKPOINT FILE.safetensors

A safetensors file holds named tensors and no code. The library for it comes with
`pip install "lightning-dear[weights]"`.
"""

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_dear.checkpoint import files, folder
from lightning_dear.names import need

_OWN_KEY = "lightning_dear"
"""Key of the file's metadata. Its value is JSON, with the entries "tied" and "sha256"."""


def export(
    checkpoint: str | Path,
    file: str | Path,
    *,
    cut: str | Sequence[str] = (),
    current: bool = False,
    weights_only: bool | None = None,
) -> None:
    """Writes the weights in a checkpoint file or folder to a safetensors file. Local.

    Tied weights are written once. `safetensors.torch.load_model` and `read` restore them. Needs
    memory for the checkpoint, and for the weights twice.

    Args:
        checkpoint: A Trainer's checkpoint: a file, or a folder of `save_distributed_checkpoint`.
        file: Path of the file to write. It must not exist. The file gets this name only when it is
            complete.
        cut: A prefix of names, such as "net.", or several. Each is cut off the names that begin
            with it, one prefix after the other.
        current: Whether to write the weights that were trained, where the checkpoint also has their
            average (Lightning's `WeightAveraging`). Otherwise the average is written.
        weights_only: Same as the argument of `torch.load`.

    Raises:
        FileExistsError: If `file` exists.
        ValueError: If the checkpoint is damaged or has no such weights, if an entry is no plain
            tensor, or if a prefix begins no name, or cut names are no longer different.
        Exception: All else that `folder.load`, `torch.load` and `files.write` raise.
    """
    need("A safetensors file", "safetensors", extra="weights")
    import safetensors.torch as format_

    if (target := Path(file)).exists():
        raise FileExistsError(f"{target} exists already. Remove it or name another file.")
    if folder.is_folder(checkpoint):
        content = folder.load(checkpoint, weights_only=weights_only)
    else:
        load = partial(torch.load, checkpoint, map_location="cpu", weights_only=weights_only)
        content = files.read(checkpoint, load, check_digests=True)
    key = "current_model_state" if current else "state_dict"
    if not isinstance(state := content.get(key), Mapping):
        raise files.CheckpointError(
            f"{checkpoint} has no {key!r}. Name a Trainer's checkpoint, and leave out --current"
            " where weights are not averaged."
        )
    if wrong := [name for name, one in state.items() if not _is_plain(one)]:
        raise files.CheckpointError(
            f"A safetensors file cannot hold {', '.join(wrong)} of {checkpoint}: no plain tensor of"
            " a type that it knows. Leave it out of the module's state_dict."
        )
    tensors, tied = _untied(_cut(state, [cut] if isinstance(cut, str) else cut))
    own = {"tied": tied, "sha256": _digest(tensors, tied)}
    metadata = {"format": "pt", _OWN_KEY: json.dumps(own)}
    files.write(tensors, target, lambda value, stream: stream.write(format_.save(value, metadata)))


def read(file: str | Path) -> dict[str, Tensor]:
    """Returns name -> tensor of a safetensors file, on the CPU. Local.

    Tied weights that `export` has written once have all their names. In its files, changed tensors
    and changed names are found. Files of other programs are read, too, without that.

    Raises:
        ValueError: If the file is damaged, or no safetensors file. The message names it.
        FileNotFoundError: If there is no such file.
    """
    need("A safetensors file", "safetensors", extra="weights")
    import safetensors

    if Path(file).is_dir():
        raise files.CheckpointError(f"{file} is a folder. Name a safetensors file.")
    try:
        with safetensors.safe_open(file, framework="pt") as stream:
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
            own = dict(json.loads((stream.metadata() or {}).get(_OWN_KEY, "{}")))
    except (safetensors.SafetensorError, TypeError, ValueError) as error:
        raise files.CheckpointError(
            f"{file} cannot be loaded ({error}). Copy it again: it is damaged, or no safetensors"
            " file."
        ) from error
    if not own:
        return tensors
    tied = own.get("tied")
    if not isinstance(tied, dict) or own.get("sha256") != _digest(tensors, tied):
        raise files.CheckpointError(f"{file} is damaged: not what was written. Copy it again.")
    return tensors | {name: tensors[kept] for name, kept in tied.items()}


def _is_plain(value: Any) -> bool:
    """Tells whether a safetensors file can hold `value`."""
    import safetensors.torch as format_

    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    if value.is_quantized or value.is_meta:
        return False
    try:
        format_.save({"one": torch.empty(1, dtype=value.dtype)})
    except (KeyError, ValueError):
        return False
    return True


def _cut(state: Mapping[str, Tensor], prefixes: Sequence[str]) -> dict[str, Tensor]:
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in state):
            raise ValueError(
                f"No name begins with {prefix!r}; the first one is {next(iter(state), None)!r}."
            )
        cut = {name.removeprefix(prefix): one for name, one in state.items()}
        if len(cut) < len(state):
            raise ValueError(f"Without {prefix!r} two entries have one name. Do not cut it.")
        state = cut
    return dict(state)


def _untied(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the tensors without repetitions, in memory of their own, and name -> kept name."""
    kept: dict[Any, str] = {}
    tied = {}
    for name, one in state.items():
        place = (one.untyped_storage().data_ptr(), one.storage_offset(), one.shape, one.stride())
        first = kept.setdefault((*place, one.dtype) if one.numel() else name, name)
        tied.update({name: first} if first != name else {})
    # Cloned, because safetensors refuses views of one memory.
    return {name: state[name].detach().contiguous().clone() for name in kept.values()}, tied


def _digest(tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> str:
    found = hashlib.sha256(json.dumps(tied, sort_keys=True).encode())
    for name, one in sorted(tensors.items()):
        found.update(f"{name} {one.dtype} {tuple(one.shape)}".encode())
        found.update(one.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command of this module. If it fails, the process exits with code 1 and a message.

    Args:
        arguments: Command-line arguments. None means those of this process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m lightning_dear.checkpoint.weights",
        description="Write the weights of a checkpoint to a safetensors file.",
    )
    parser.add_argument("checkpoint", help="a Trainer's checkpoint, a file or a folder")
    parser.add_argument("file", help="file to write; it must not exist")
    parser.add_argument(
        "--cut", action="append", default=[], help="prefix of names to cut, such as net."
    )
    parser.add_argument(
        "--current", action="store_true", help="the trained weights instead of their average"
    )

    def act(given: argparse.Namespace, weights_only: bool | None) -> None:
        how = {"cut": given.cut, "current": given.current, "weights_only": weights_only}
        export(given.checkpoint, given.file, **how)

    files.run_command(parser, arguments, act)


if __name__ == "__main__":
    main()
