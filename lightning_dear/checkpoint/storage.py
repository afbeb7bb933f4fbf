"""A checkpoint's tensors to and from a folder, in the format of torch.distributed.checkpoint.

The nested checkpoint is taken apart into a small skeleton and named tensors, and put together.
Every tensor is stored 1-D, in storage order and in chunks, so that any rank can write any part.
"""

from __future__ import annotations

import copy
import io
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from typing_extensions import override

from lightning_dear.bucket import Chunk, as_flat, storage_strides
from lightning_dear.checkpoint import files
from lightning_dear.checkpoint.optimizer_state import ShardedState

MAX_CHUNK_NUMEL = 1 << 22
"""Longer chunks are cut: one at a time is copied to the CPU, written or read."""

_MARK = "lightning_dear.tensor"
_SMALL_BYTES = 1024

_Path = tuple[str, ...]

FilePlace = tuple[str, int, str, int, int]
"""Name of a tensor and number of a chunk's first element; file, offset and length in bytes."""


# --- the nested checkpoint, taken apart and put together ------------------------------------------


@dataclass(frozen=True)
class Stored:
    """Describes a tensor to write, as far as it lies here.

    Attributes:
        stand_in: Its shape, strides and dtype, on the meta device, without gaps.
        chunks: What lies here of it; a chunk that several ranks have, one of them writes.
        is_rank_0s: Whether only what rank 0 has is written.
    """

    stand_in: Tensor
    chunks: Sequence[Chunk]
    is_rank_0s: bool = False


def take_apart(checkpoint: Mapping[str, Any]) -> tuple[Any, dict[str, Stored]]:
    """Returns the checkpoint with names in place of tensors, and what they name; copies little.

    A tensor's name is its path, "state_dict.net.weight". One that stands in several places (tied
    weights) is named once. The smallest ones stay where they are.

    Raises:
        ValueError: For a tensor without data whose pieces are not known.
    """
    walk = _Walk(checkpoint)
    return walk.taken_apart(checkpoint, ()), walk.stored


def put_together(skeleton: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns the checkpoint with `tensors` in the places of their names."""
    if type(skeleton) in (list, tuple):
        return type(skeleton)(put_together(item, tensors) for item in skeleton)
    if type(skeleton) not in (dict, OrderedDict):
        return skeleton
    if skeleton.keys() == {_MARK}:
        return tensors[skeleton[_MARK]]
    for key, item in skeleton.items():
        skeleton[key] = put_together(item, tensors)
    return skeleton


class _Walk:
    """Through a whole checkpoint; `stored` is what was found so far."""

    def __init__(self, checkpoint: Mapping[str, Any]) -> None:
        self.stored: dict[str, Stored] = {}
        self._chunks: dict[int, Sequence[Chunk]] = {}
        self._parameters: set[tuple[Any, ...]] = set()
        self._seen: dict[tuple[Any, ...], Any] = {}
        for state in checkpoint.get("optimizer_states", ()):
            if isinstance(state, ShardedState):
                self._chunks |= {id(stand_in): chunks for stand_in, chunks in state.chunks}
                self._parameters |= {_place(parameter) for parameter in state.parameters}

    def taken_apart(self, value: Any, path: _Path) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, ShardedState):
            value = dict(value)
        if type(value) in (dict, OrderedDict):
            # Not value.copy(): a module's state dict carries its version as an attribute.
            copied = copy.copy(value)
            for key, item in value.items():
                copied[key] = self.taken_apart(item, (*path, str(key)))
            return copied
        if type(value) in (list, tuple):
            items = enumerate(value)
            return type(value)(self.taken_apart(item, (*path, str(at))) for at, item in items)
        return value

    def _tensor(self, value: Tensor, path: _Path) -> Any:
        if value.device.type == "meta":
            if id(value) not in self._chunks:
                raise ValueError(
                    f"checkpoint['{'.'.join(path)}'] is a tensor without data (on the meta device)."
                    " Put a copy of the state, or nothing, into the checkpoint."
                )
            return self._named(value, path, self._chunks[id(value)], is_rank_0s=False)
        # Subclasses, sparse and quantized tensors are more than flat numbers: they stay, pickled.
        if type(value) is not Tensor or value.layout != torch.strided or value.is_quantized:
            return value
        if _place(value) not in self._seen:
            self._seen[_place(value)] = self._kept(value.detach(), path)
        return self._seen[_place(value)]

    def _kept(self, value: Tensor, path: _Path) -> Any:
        if value.nbytes <= _SMALL_BYTES or value.is_conj() or value.is_neg():
            # A copy: a view would take the buffer that it is a part of into the file.
            return value.clone()
        is_everybodys = _place(value) in self._parameters
        return self._named(value, path, [Chunk(0, value)], is_rank_0s=not is_everybodys)

    def _named(
        self, value: Tensor, path: _Path, chunks: Sequence[Chunk], *, is_rank_0s: bool
    ) -> dict[str, str]:
        """What stands for a tensor, which is stored by its name."""
        name = ".".join(path)
        while name in self.stored:
            name += "'"
        self.stored[name] = Stored(torch.empty_like(value, device="meta"), chunks, is_rank_0s)
        return {_MARK: name}


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.size(), tensor.stride()


# --- named tensors, to and from a folder ----------------------------------------------------------


def write_tensors(
    folder: Path,
    tensors: Mapping[str, Stored],
    finish: Callable[[list[FilePlace]], None],
    target: Path,
) -> None:
    """Writes every rank's part of `tensors` into `folder`. Collective, blocks.

    Runs on the default process group. What `finish` raises, all ranks raise. Whatever is raised,
    the folder is gone then.

    Args:
        folder: On storage that all ranks share; what it holds is removed.
        tensors: By name; a name that several ranks have is the same tensor.
        finish: Called on rank 0, with the places of all chunks, when all tensors are written, and
            what torch reads them by.
        target: Named where writing fails.
    """
    with warnings.catch_warnings():
        # Without a process group there is one rank, as it says.
        warnings.filterwarnings("ignore", "torch.distributed is (unavailable|disabled)")
        # torch 2.6 uses what it deprecates.
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")
        writer = _Writer(folder, finish, target)
        try:
            dcp.state_dict_saver.save(dict(tensors), storage_writer=writer, planner=_SavePlanner())
        except BaseException:
            # No rank writes any more: they have agreed on it, or one of them is gone.
            shutil.rmtree(folder, ignore_errors=True)
            raise


def read_tensors(
    folder: Path,
    stand_ins: Mapping[str, Tensor],
    places: list[FilePlace],
    check_digests: bool = True,
) -> dict[str, Tensor]:
    """Returns name -> the whole tensor on the CPU, shaped like its stand-in. Local.

    Needs memory for the result and two chunks.

    Args:
        folder: That `write_tensors` has written.
        stand_ins: Name -> shape, strides and dtype of what is to be read.
        places: Of all chunks, as `finish` was told.
        check_digests: Whether the bytes of each chunk must be those that were written.

    Raises:
        ValueError: If the folder is not complete, or damaged.
        Exception: Of other kinds, if what is in it makes no sense.
    """
    tensors = {name: torch.empty_like(like, device="cpu") for name, like in stand_ins.items()}
    ends = dict.fromkeys(tensors, 0)
    for name, start, file, offset, length in sorted(places):
        path = folder / file
        # A stranger's file may name others' files.
        is_here = path.parent == folder and path.is_file()
        if not is_here or path.stat().st_size < offset + length:
            raise files.CheckpointError(
                f"{path} is missing or cut off, or checkpoint.pt is not of this checkpoint: it was"
                " not copied in whole, or is damaged. Copy it again, or use an earlier one."
            )
        if start == ends.get(name):
            with path.open("rb") as opened:
                opened.seek(offset)
                content = io.BytesIO(opened.read(length))
            if check_digests:
                files.check_records(content, path, f"'{name}'")
            values = torch.load(content, map_location="cpu", weights_only=True)
            ends[name] += values.numel()
            tensors[name].as_strided((tensors[name].numel(),), (1,))[start : ends[name]] = values
    for name, tensor in tensors.items():
        if ends[name] != tensor.numel():
            raise files.CheckpointError(
                f"{folder} holds {ends[name]} of the {tensor.numel()} elements of '{name}': it is"
                " damaged. Use an earlier checkpoint."
            )
    return tensors


class _SavePlanner(dcp.default_planner.DefaultSavePlanner):
    """Offers the chunks that lie here; the inherited part spreads what several ranks offer."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._values: dict[tuple[str, int], Tensor] = {}

    @override
    def create_local_plan(self) -> dcp.planner.SavePlan:
        items = []
        for name, stored in self.state_dict.items():
            if stored.is_rank_0s and not self.is_coordinator:
                continue
            for chunk in _cut(stored):
                self._values[name, chunk.start] = chunk.values
                items.append(_write_item(name, stored.stand_in, chunk))
        self.plan = dcp.planner.SavePlan(items)
        return self.plan

    @override
    def resolve_data(self, write_item: dcp.planner.WriteItem) -> Tensor:
        assert write_item.index.offset is not None
        return self._values[write_item.index.fqn, write_item.index.offset[0]]


def _cut(stored: Stored) -> Iterator[Chunk]:
    for chunk in stored.chunks:
        flat = as_flat(chunk.values, storage_strides(chunk.values))
        for start in range(0, flat.numel(), MAX_CHUNK_NUMEL):
            yield Chunk(chunk.start + start, flat[start : start + MAX_CHUNK_NUMEL])


def _write_item(name: str, stand_in: Tensor, chunk: Chunk) -> dcp.planner.WriteItem:
    offsets = torch.Size([chunk.start])
    data = dcp.planner.TensorWriteData(
        chunk=dcp.metadata.ChunkStorageMetadata(offsets, chunk.values.size()),
        properties=dcp.metadata.TensorProperties(dtype=stand_in.dtype),
        size=torch.Size([stand_in.numel()]),
    )
    index = dcp.metadata.MetadataIndex(name, offsets)
    return dcp.planner.WriteItem(index, dcp.planner.WriteItemType.SHARD, tensor_data=data)


class _Writer(dcp.filesystem.FileSystemWriter):
    def __init__(
        self, folder: Path, finish: Callable[[list[FilePlace]], None], target: Path
    ) -> None:
        super().__init__(folder)
        self._folder, self._finish, self._target = folder, finish, target

    @override
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            # Others may make the folder at the same time, so that it stays; they write only after
            # rank 0 has planned.
            self._folder.mkdir(parents=True, exist_ok=True)
            for left in self._folder.iterdir():
                with suppress(OSError):
                    files.delete(left)
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    @override
    def prepare_global_plan(self, plans: list[dcp.planner.SavePlan]) -> list[dcp.planner.SavePlan]:
        plans = super().prepare_global_plan(plans)
        for plan in plans:
            # Of this save alone: a file of another, copied into the folder, has another name.
            plan.storage_data.prefix += f"{self.save_id}_"
        return plans

    @override
    def write_data(self, plan: dcp.planner.SavePlan, planner: Any) -> Any:
        with files.naming(self._target):
            return super().write_data(plan, planner)

    @override
    def finish(self, metadata: dcp.metadata.Metadata, results: list[list[Any]]) -> None:
        # A folder of each host's own looks complete there, but lacks the others' files.
        places = [_place_of(one) for result in results for one in result]
        missing = sorted({file for _, _, file, *_ in places if not (self._folder / file).exists()})
        if missing:
            raise RuntimeError(
                f"Rank 0 does not see {', '.join(missing)} in {self._folder}, which other ranks"
                " have written: save to a folder that all hosts share, or leave out"
                " save_distributed_checkpoint=True."
            )
        with files.naming(self._target):
            super().finish(metadata, results)
            self._finish(places)


def _place_of(written: Any) -> FilePlace:
    index, info = written.index, written.storage_data
    return index.fqn, index.offset[0], info.relative_path, info.offset, info.length
