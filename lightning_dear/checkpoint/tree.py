"""A nested checkpoint taken apart into a small skeleton and named tensors, and put together."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_dear.checkpoint.sharded_state import Chunk, ShardedState

_MARK = "lightning_dear.tensor"
_SMALL_BYTES = 1024

_Path = tuple[str, ...]


@dataclass
class TakenApart:
    """A checkpoint taken apart.

    Attributes:
        skeleton: The checkpoint with names in place of tensors; the smallest ones stay in it.
        whole: Name -> a tensor that lies here in whole.
        sharded: Name -> this rank's chunks of a tensor that no rank has in whole.
        replicated: Names in `whole` of which all ranks have the same.
        stand_ins: Name -> shape, strides and dtype, as a tensor on the meta device without gaps.
    """

    skeleton: Any = None
    whole: dict[str, Tensor] = field(default_factory=dict)
    sharded: dict[str, Sequence[Chunk]] = field(default_factory=dict)
    replicated: set[str] = field(default_factory=set)
    stand_ins: dict[str, Tensor] = field(default_factory=dict)


def take_apart(checkpoint: Mapping[str, Any]) -> TakenApart:
    """Names every tensor by its path, "state_dict.net.weight"; copies no large one.

    A tensor that stands in several places (tied weights) is named once.

    Raises:
        ValueError: For a tensor without data whose pieces are not known.
    """
    return _Walk().run(checkpoint)


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
    def __init__(self) -> None:
        self._taken = TakenApart()
        self._chunks: dict[int, Sequence[Chunk]] = {}
        self._parameters: set[tuple[Any, ...]] = set()
        self._seen: dict[tuple[Any, ...], Any] = {}

    def run(self, checkpoint: Mapping[str, Any]) -> TakenApart:
        for state in checkpoint.get("optimizer_states", ()):
            if isinstance(state, ShardedState):
                self._chunks |= {id(stand_in): chunks for stand_in, chunks in state.chunks}
                self._parameters |= {_place(parameter) for parameter in state.parameters}
        self._taken.skeleton = self._walk(checkpoint, ())
        return self._taken

    def _walk(self, value: Any, path: _Path) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, ShardedState):
            value = dict(value)
        if type(value) in (dict, OrderedDict):
            # Not value.copy(): a module's state dict carries its version as an attribute.
            copied = copy.copy(value)
            for key, item in value.items():
                copied[key] = self._walk(item, (*path, str(key)))
            return copied
        if type(value) in (list, tuple):
            return type(value)(
                self._walk(item, (*path, str(place))) for place, item in enumerate(value)
            )
        return value

    def _tensor(self, value: Tensor, path: _Path) -> Any:
        if value.device.type == "meta":
            if id(value) not in self._chunks:
                raise ValueError(
                    f"checkpoint['{'.'.join(path)}'] is a tensor without data (on the meta device)."
                    " Put a copy of the state, or nothing, into the checkpoint."
                )
            name = self._name(path, value)
            self._taken.sharded[name] = self._chunks[id(value)]
            return {_MARK: name}
        # Subclasses, sparse and quantized tensors are more than flat numbers: they stay, pickled.
        if type(value) is not Tensor or value.layout != torch.strided or value.is_quantized:
            return value
        if _place(value) not in self._seen:
            self._seen[_place(value)] = self._keep(value, path)
        return self._seen[_place(value)]

    def _keep(self, value: Tensor, path: _Path) -> Any:
        if value.nbytes <= _SMALL_BYTES or value.is_conj() or value.is_neg():
            # A copy: a view would take the buffer that it is a part of into the file.
            return value.detach().clone()
        name = self._name(path, value)
        self._taken.whole[name] = value.detach()
        if _place(value) in self._parameters:
            self._taken.replicated.add(name)
        return {_MARK: name}

    def _name(self, path: _Path, value: Tensor) -> str:
        name = ".".join(path)
        while name in self._taken.stand_ins:
            name += "'"
        self._taken.stand_ins[name] = torch.empty_like(value, device="meta")
        return name


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.size(), tensor.stride()
