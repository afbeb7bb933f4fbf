"""Writes and reads the tensors of a checkpoint folder, in torch.distributed.checkpoint's format.

`take_apart` splits a nested checkpoint into a small skeleton and named tensors, and `put_together`
is its inverse. Every tensor is stored 1-D, in storage order and in chunks, so that any rank can
write any part of it.
"""

import copy
import io
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from typing_extensions import override

from lightning_dear.bucket import Chunk, as_flat, storage_strides
from lightning_dear.checkpoint import files, optimizer_state

MAX_CHUNK_NUMEL = 1 << 22
"""Most elements of a chunk in a file. Longer chunks are cut, because a whole chunk is in memory
while it is copied to the CPU, written or read."""

_MARK = "lightning_dear.tensor"
_SMALL_BYTES = 1024

_Path = tuple[str, ...]

FilePlace = tuple[str, int, str, int, int]
"""Where a chunk is: tensor name, index of the chunk's first element, file name, offset in the file
in bytes, length in bytes."""

_Finish = Callable[[list[FilePlace]], None]


# --- the nested checkpoint, taken apart and put together ------------------------------------------


class Stored(NamedTuple):
    """A tensor to write, with the chunks of it that this rank has.

    Attributes:
        stand_in: Tensor on the meta device with the shape, strides and dtype, without gaps.
        chunks: This rank's chunks. If several ranks have a chunk, one of them writes it.
        is_rank_0s: Whether only rank 0's chunks are written. If not, the chunks of all ranks are.
    """

    stand_in: Tensor
    chunks: Sequence[Chunk]
    is_rank_0s: bool = False


def take_apart(checkpoint: Mapping[str, Any]) -> tuple[Any, dict[str, Stored]]:
    """Replaces the tensors of a nested checkpoint by names. `checkpoint` is not mutated.

    A name is the path of keys, such as "state_dict.net.weight". A tensor that occurs several times
    (tied weights) gets one name. Tensors of at most 1 KiB stay in the skeleton, and so do tensors
    that are more than a flat list of elements, such as sparse ones.

    Returns:
        The skeleton, and name -> tensor. Strided tensors that stay in the skeleton are copied, the
        others are not.

    Raises:
        ValueError: For a tensor on the meta device that is not a stand-in of a `ShardedState`.
    """
    walk = _Walk(checkpoint)
    return walk.taken_apart(checkpoint, ()), walk.stored


def put_together(skeleton: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns the nested checkpoint: the skeleton with tensors in place of their names.

    Args:
        skeleton: Skeleton that `take_apart` has returned. Its dicts are mutated.
        tensors: Name -> tensor, for all names in the skeleton.
    """
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
    """Walks once through a nested checkpoint for `take_apart`, and collects its tensors.

    Args:
        checkpoint: The whole checkpoint, whose `ShardedState` says which chunks this rank has.

    Attributes:
        stored: Name -> tensor, of the tensors found so far.
    """

    def __init__(self, checkpoint: Mapping[str, Any]) -> None:
        self.stored: dict[str, Stored] = {}
        self._chunks: dict[int, Sequence[Chunk]] = {}
        self._parameters: set[tuple[Any, ...]] = set()
        self._seen: dict[tuple[Any, ...], Any] = {}
        for state in checkpoint.get("optimizer_states", ()):
            if isinstance(state, optimizer_state.ShardedState):
                self._parameters |= {_place(parameter) for parameter in state.parameters}

    def taken_apart(self, value: Any, path: _Path) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, optimizer_state.ShardedState):
            self._chunks |= {id(stand_in): chunks for stand_in, chunks in value.chunks}
            value = dict(value)
        if type(value) in (dict, OrderedDict):
            # `copy.copy` also copies attributes, such as `_metadata` of a module's state dict,
            # which `value.copy()` would drop.
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
                    " Save a tensor with data under this key, or leave the key out."
                )
            # A stand-in that occurs several times, as a view of memory, is written once.
            if (key := (id(value),)) not in self._seen:
                self._seen[key] = self._named(value, path, self._chunks[id(value)])
            return self._seen[key]
        # Subclasses, sparse and quantized tensors are more than a flat list of elements, so they
        # stay in the skeleton and are pickled.
        if type(value) is not Tensor or value.layout != torch.strided or value.is_quantized:
            return value
        if _place(value) not in self._seen:
            self._seen[_place(value)] = self._kept(value.detach(), path)
        return self._seen[_place(value)]

    def _kept(self, value: Tensor, path: _Path) -> Any:
        if value.nbytes <= _SMALL_BYTES or value.is_conj() or value.is_neg():
            # Cloned, because torch.save writes the whole storage that a view belongs to.
            return value.clone()
        # Parameters are equal on all ranks, so writing them is divided among the ranks.
        is_rank_0s = _place(value) not in self._parameters
        return self._named(value, path, [Chunk(0, value)], is_rank_0s=is_rank_0s)

    def _named(
        self, value: Tensor, path: _Path, chunks: Sequence[Chunk], *, is_rank_0s: bool = False
    ) -> dict[str, str]:
        """Adds a tensor to `stored`, and returns the dict that names it in the skeleton."""
        name = ".".join(path)
        while name in self.stored:
            name += "'"
        self.stored[name] = Stored(torch.empty_like(value, device="meta"), chunks, is_rank_0s)
        return {_MARK: name}


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Returns a key that is equal for two tensors if they are the same view of memory.

    Of tensors that have elements and lie on one device, only such views have equal keys.
    """
    return tensor.data_ptr(), tensor.dtype, tensor.size(), tensor.stride()


# --- named tensors, to and from a folder ----------------------------------------------------------


def write_tensors(folder: Path, tensors: dict[str, Stored], finish: _Finish, target: Path) -> None:
    """Writes every rank's chunks of `tensors` into `folder`. Collective. Blocks.

    Runs on the default process group. If writing or `finish` raises on any rank, all ranks raise
    and the folder is removed.

    Args:
        folder: Temporary folder on storage that all ranks share. Rank 0 removes what is in it.
        tensors: Name -> tensor. Ranks that have the same name have parts of the same tensor.
        finish: Called on rank 0 with the places of all chunks, after all tensors and torch's
            metadata are written.
        target: Path of the checkpoint, for error messages.
    """
    with warnings.catch_warnings():
        # torch warns of saving without a process group, which is fine for one rank.
        warnings.filterwarnings("ignore", "torch.distributed is (unavailable|disabled)")
        # torch 2.6 itself uses this deprecated class.
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")
        writer = _Writer(folder, finish, target)
        try:
            dcp.state_dict_saver.save(dict(tensors), storage_writer=writer, planner=_SavePlanner())
        except BaseException:
            # Safe to remove: torch raises on all ranks together once one has failed, or a rank has
            # died and the others have stopped writing.
            shutil.rmtree(folder, ignore_errors=True)
            raise


def read_tensors(
    folder: Path, stand_ins: Mapping[str, Tensor], places: list[FilePlace], check_digests: bool
) -> dict[str, Tensor]:
    """Reads whole tensors from a folder: name -> tensor on the CPU. Local.

    Needs memory for the result and two chunks.

    Args:
        folder: Folder that `write_tensors` has written.
        stand_ins: Name -> meta tensor with the shape, strides and dtype of the tensor to read.
        places: Places of all chunks, as `finish` got them.
        check_digests: Whether to compare the bytes of each chunk with the written digest. Without
            it a changed byte may go unnoticed.

    Raises:
        ValueError: If the folder is incomplete or damaged.
        Exception: Of another type, such as KeyError, if the data in the folder is malformed.
    """
    tensors = {name: torch.empty_like(like, device="cpu") for name, like in stand_ins.items()}
    ends = dict.fromkeys(tensors, 0)
    for name, start, file, offset, length in sorted(places):
        path = folder / file
        # The checkpoint may come from an untrusted source and name files outside its folder.
        if path.parent != folder or not path.is_file() or path.stat().st_size < offset + length:
            raise files.CheckpointError(
                f"{path} is missing or cut off, or checkpoint.pt is not of this checkpoint. Copy"
                " the folder again, or use an earlier one: it is damaged, or was copied in part."
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
                f"{folder} is damaged: it holds {ends[name]} of the {tensor.numel()} elements of"
                f" '{name}'. Use an earlier checkpoint."
            )
    return tensors


class _SavePlanner(dcp.default_planner.DefaultSavePlanner):
    """Plans to write this rank's chunks of each `Stored`, unless only rank 0's are written.

    The base class removes duplicates: of several ranks that plan to write the same chunk, one is
    chosen so that all ranks write about equally much.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._values: dict[tuple[str, int], Tensor] = {}

    @override
    def create_local_plan(self) -> dcp.planner.SavePlan:
        items = []
        for name, stored in self.state_dict.items():
            for chunk in _cut(stored) if self.is_coordinator or not stored.is_rank_0s else ():
                self._values[name, chunk.start] = chunk.values
                items.append(_write_item(name, stored.stand_in, chunk))
        self.plan = dcp.planner.SavePlan(items)
        return self.plan

    @override
    def resolve_data(self, write_item: dcp.planner.WriteItem) -> Tensor:
        assert write_item.index.offset is not None
        return self._values[write_item.index.fqn, write_item.index.offset[0]]


def _cut(stored: Stored) -> Iterator[Chunk]:
    """Yields this rank's chunks as flat tensors of at most `MAX_CHUNK_NUMEL` elements."""
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
    """torch's writer. Also removes old files, gives files unique names, and calls `finish`.

    Rank 0 removes the old files before any rank writes, and calls `finish` after all have written.

    Args:
        folder: Same as the argument of `write_tensors`.
        finish: Same as the argument of `write_tensors`.
        target: Same as the argument of `write_tensors`.
    """

    def __init__(self, folder: Path, finish: _Finish, target: Path) -> None:
        super().__init__(folder)
        self._folder, self._finish, self._target = folder, finish, target

    @override
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            # The folder itself is not replaced, since other ranks may create it at the same time.
            # Removing files is safe: other ranks write only after rank 0 has planned.
            self._folder.mkdir(parents=True, exist_ok=True)
            for left in self._folder.iterdir():
                with suppress(OSError):
                    files.delete(left)
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    @override
    def prepare_global_plan(self, plans: list[dcp.planner.SavePlan]) -> list[dcp.planner.SavePlan]:
        plans = super().prepare_global_plan(plans)
        for plan in plans:
            # File names are unique for each save, so that a file of another checkpoint that was
            # copied into this folder is never taken for one of this checkpoint.
            plan.storage_data.prefix += f"{self.save_id}_"
        return plans

    @override
    def write_data(self, plan: dcp.planner.SavePlan, planner: Any) -> Any:
        with files.naming(self._target):
            return super().write_data(plan, planner)

    @override
    def finish(self, metadata: dcp.metadata.Metadata, results: list[list[Any]]) -> None:
        # Rank 0 runs this. If the folder is not on shared storage, it does not see the files of
        # other hosts.
        places = [_place_of(one) for result in results for one in result]
        missing = sorted({file for _, _, file, *_ in places if not (self._folder / file).exists()})
        if missing:
            raise RuntimeError(
                f"Rank 0 does not see {', '.join(missing)} in {self._folder}, which other ranks"
                " have written. Save to a folder that all hosts share, or leave out"
                " save_distributed_checkpoint=True."
            )
        with files.naming(self._target):
            super().finish(metadata, results)
            self._finish(places)


def _place_of(written: Any) -> FilePlace:
    index, info = written.index, written.storage_data
    return index.fqn, index.offset[0], info.relative_path, info.offset, info.length
