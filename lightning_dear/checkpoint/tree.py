"""A nested checkpoint taken apart into a small skeleton and named tensors, and put together."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_dear.bucket import Chunk
from lightning_dear.checkpoint.optimizer_state import ShardedState

_MARK = "lightning_dear.tensor"
_SMALL_BYTES = 1024

_Path = tuple[str, ...]


@dataclass(frozen=True)
class Stored:
    """A tensor to write, as far as it lies here.

    Attributes:
        stand_in: Its shape, strides and dtype, on the meta device, without gaps.
        chunks: What lies here of it; a chunk that several ranks have, one of them writes.
        is_rank_0s: Whether only what rank 0 has is written.
    """

    stand_in: Tensor
    chunks: Sequence[Chunk]
    is_rank_0s: bool = False


def take_apart(checkpoint: Mapping[str, Any]) -> tuple[Any, dict[str, Stored]]:
    """The checkpoint with names in place of tensors, and what they name; copies no large one.

    A tensor's name is its path, "state_dict.net.weight". One that stands in several places (tied
    weights) is named once. The smallest ones stay where they are.

    Raises:
        ValueError: For a tensor without data whose pieces are not known.
    """
    walk = _Walk(checkpoint)
    return walk.taken_apart(checkpoint, ()), walk.stored


def put_together(skeleton: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The checkpoint again, with `tensors` in the places of their names."""
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
