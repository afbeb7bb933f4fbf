"""Named tensors to and from a folder, through torch.distributed.checkpoint.

Every tensor is stored 1-D, in storage order and in chunks, so that any rank can write any part.
"""

from __future__ import annotations

import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save as save_collectively
from typing_extensions import override

from lightning_dear.bucket import as_flat, storage_strides
from lightning_dear.checkpoint.format import METADATA_FILE
from lightning_dear.checkpoint.optimizer_state import Chunk
from lightning_dear.checkpoint.tree import Stored

Action = Callable[[], None]

MAX_CHUNK_NUMEL = 1 << 22
"""Longer chunks are cut: one at a time is copied to the CPU, written or read."""


def write_tensors(
    folder: Path, tensors: Mapping[str, Stored], finish: Action, commit: Action
) -> None:
    """Writes every rank's part of `tensors` into `folder`. Collective, blocks.

    Runs on the default process group. What `finish` and `commit` raise, all ranks raise.

    Args:
        folder: On storage that all ranks share; what it holds is removed.
        tensors: By name; a name that several ranks have is the same tensor.
        finish: Called on rank 0 when all data is written, before the folder is complete.
        commit: Called on rank 0 when the folder is complete.
    """
    with warnings.catch_warnings():
        # Without a process group there is one rank, as it says.
        warnings.filterwarnings("ignore", "torch.distributed is (unavailable|disabled)")
        # torch 2.6 uses what it deprecates.
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")
        save_collectively(
            dict(tensors), storage_writer=_Writer(folder, finish, commit), planner=_SavePlanner()
        )


def read_tensors(folder: Path, stand_ins: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name -> the whole tensor on the CPU, shaped like its stand-in. Local: any process may call.

    Needs memory for the result and one chunk.

    Raises:
        ValueError: If the folder is not complete.
    """
    reader = _Reader(folder)
    metadata = reader.read_metadata()
    _check_complete(folder, metadata, stand_ins)
    tensors = {name: torch.empty_like(like, device="cpu") for name, like in stand_ins.items()}
    flat = {name: tensor.as_strided((tensor.numel(),), (1,)) for name, tensor in tensors.items()}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    # Step by step, since `load` is collective wherever there is a process group.
    planner.set_up_planner(flat, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    reader.read_data(plan, planner).wait()
    return tensors


class _SavePlanner(DefaultSavePlanner):
    """Offers the chunks that lie here; the inherited part spreads what several ranks offer."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._values: dict[tuple[str, int], Tensor] = {}

    @override
    def create_local_plan(self) -> SavePlan:
        items = []
        for name, stored in self.state_dict.items():
            if stored.is_rank_0s and not self.is_coordinator:
                continue
            for chunk in _cut(stored):
                self._values[name, chunk.start] = chunk.values
                items.append(_write_item(name, stored.stand_in, chunk))
        self.plan = SavePlan(items)
        return self.plan

    @override
    def resolve_data(self, write_item: WriteItem) -> Tensor:
        assert write_item.index.offset is not None
        return self._values[write_item.index.fqn, write_item.index.offset[0]]


def _cut(stored: Stored) -> Iterator[Chunk]:
    for chunk in stored.chunks:
        flat = as_flat(chunk.values, storage_strides(chunk.values))
        for start in range(0, flat.numel(), MAX_CHUNK_NUMEL):
            yield Chunk(chunk.start + start, flat[start : start + MAX_CHUNK_NUMEL])


def _write_item(name: str, stand_in: Tensor, chunk: Chunk) -> WriteItem:
    offsets = torch.Size([chunk.start])
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets, chunk.values.size()),
        properties=TensorProperties(dtype=stand_in.dtype),
        size=torch.Size([stand_in.numel()]),
    )
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


class _Writer(FileSystemWriter):
    def __init__(self, folder: Path, finish: Action, commit: Action) -> None:
        super().__init__(folder)
        self._folder = folder
        self._finish = finish
        self._commit = commit

    @override
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            # Others may make the folder at the same time, so that it stays; they write only after
            # rank 0 has planned.
            self._folder.mkdir(parents=True, exist_ok=True)
            for left in self._folder.iterdir():
                with suppress(OSError):
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    @override
    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        # A folder of each host's own looks complete there, but lacks the others' files.
        written = {one.storage_data.relative_path for result in results for one in result}
        missing = sorted(name for name in written if not (self._folder / name).exists())
        if missing:
            raise RuntimeError(
                f"Rank 0 does not see {', '.join(missing)} in {self._folder}, which other ranks"
                " have written: save to a folder that all hosts share, or leave out"
                " save_distributed_checkpoint=True."
            )
        # Before torch's metadata: a folder without that is known to be incomplete.
        self._finish()
        super().finish(metadata, results)
        self._commit()


class _Reader(FileSystemReader):
    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """As inherited, but what the file names is not run."""
        with (Path(self.path) / METADATA_FILE).open("rb") as file:
            metadata: Metadata = _MetadataUnpickler(file).load()
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the records of torch.distributed.checkpoint and nothing else."""

    @override
    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) == ("builtins", "getattr"):
            return _enum_member
        package, _, module = module_name.rpartition(".")
        is_record = package == "torch.distributed.checkpoint" and (
            module == "metadata" or global_name == "_StorageInfo"
        )
        is_path = module_name.startswith("pathlib") and global_name.endswith("Path")
        is_layout = (module_name, global_name) == ("torch.serialization", "_get_layout")
        is_plain = module_name == "torch" and (
            global_name == "Size" or isinstance(getattr(torch, global_name, None), torch.dtype)
        )
        # Dotted names would lead out of the module.
        if "." in global_name or not (is_record or is_path or is_layout or is_plain):
            raise ValueError(
                f"{METADATA_FILE} names {module_name}.{global_name}, which no checkpoint of ours"
                " does: do not trust this folder."
            )
        return super().find_class(module_name, global_name)


def _check_complete(folder: Path, metadata: Metadata, stand_ins: Mapping[str, Tensor]) -> None:
    assert metadata.storage_data is not None
    for info in metadata.storage_data.values():
        file = folder / info.relative_path
        if not file.exists() or file.stat().st_size < info.offset + info.length:
            raise ValueError(
                f"{file} is missing or cut off: it was not copied in whole, or is damaged. Copy it"
                " again, or use an earlier checkpoint."
            )
    for name, stand_in in stand_ins.items():
        stored = metadata.state_dict_metadata.get(name)
        chunks = stored.chunks if isinstance(stored, TensorStorageMetadata) else []
        numel = sum(chunk.sizes.numel() for chunk in chunks)
        if numel != stand_in.numel():
            raise ValueError(
                f"{folder} holds {numel} of the {stand_in.numel()} elements of '{name}': it is"
                " damaged. Use an earlier checkpoint."
            )


def _enum_member(kind: Any, name: str) -> Enum:
    """In the place of `getattr`, with which Python 3.11.0 to 3.11.3 pickle members of enums."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise ValueError(f"{METADATA_FILE} asks for {name} of {kind}: do not trust this folder.")
    return kind[name]
