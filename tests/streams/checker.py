"""Sees every operation of torch as a kernel on the current simulated stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dear.torch_modes import Onlooker
from tests.streams.device import Device, Extent, extent_of, here, memory_of, this_thread

_MAKE_ROOM = ("aten::empty", "aten::new_empty", "aten::_efficientzerotensor")
"""Beginnings of what allocates memory, and launches nothing."""

_READ_NOTHING = (*_MAKE_ROOM, "aten::detach", "aten::alias", "aten::lift", "aten::set_")

_BLOCK = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::equal",
    "aten::is_nonzero",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::bincount",
    "aten::repeat_interleave",
}
"""For the result of these the host waits on a device."""

_INDEX = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
"""By a mask: as many places as are true, for whose number the host waits, too."""

_COPY_TO_HOST = ("tolist", "numpy", "cpu")
"""Methods that do so without an operation, where the device is only simulated."""

_WRITE_UNSAID = {"aten::native_batch_norm": (3, 4, "running_mean", "running_var")}
"""What is written though torch's schemas do not say so."""


class _Kind(NamedTuple):
    """What an operation does.

    Attributes:
        name: For people.
        is_view: Whether it makes another view of what it is given.
        is_like: Whether it makes what is like an argument, which it does not read.
        launches: Whether there is a kernel.
        blocks: Whether the host waits for it.
        indexes: Whether it does so where places are told by a mask.
        writes: Positions and names of the arguments that it writes.
    """

    name: str
    is_view: bool
    is_like: bool
    launches: bool
    blocks: bool
    indexes: bool
    writes: frozenset[int | str]


@cache
def _kind_of(operation: OpOverload) -> _Kind:
    schema = operation._schema
    writes: set[int | str] = {*_WRITE_UNSAID.get(schema.name, ())}
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes |= {number, argument.name}
    return _Kind(
        name=schema.name.removeprefix("aten::"),
        is_view=operation.is_view,
        is_like=schema.name.endswith("_like") or schema.name.startswith("aten::new_"),
        launches=not schema.name.startswith(_READ_NOTHING),
        blocks=schema.name in _BLOCK,
        indexes=schema.name in _INDEX,
        writes=frozenset(writes),
    )


class Checker(Onlooker, TorchDispatchMode):
    """A context in which kernels run on the simulated device.

    Memory is the device's if it was put there, was sent, or is made or written by an operation that
    reads what is the device's. Pinned memory stays the host's.

    Args:
        device: Of the rank whose thread enters it.
        has_host: Whether an operation on none of the device's memory is the host's own, and no
            kernel.
    """

    def __init__(self, device: Device, *, has_host: bool = False) -> None:
        super().__init__()
        self._device, self._has_host = device, has_host

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and what keeps compilers out takes a third of the time.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = _kind_of(func)
        if kind.is_view:
            return func(*args, **kwargs)
        reads: list[Extent] = []
        writes: list[Extent] = []
        is_on_device = False
        known = set()
        for key, tensor in _tensors_in(args, kwargs):
            extent = extent_of(tensor)
            known.add(extent.memory)
            is_on_device |= extent.memory.is_on_device
            if key in kind.writes:
                writes.append(extent)
            elif not kind.is_like:
                reads.append(extent)
        result = func(*args, **kwargs)
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and memory_of(tensor) not in known:
                writes.append(extent_of(tensor))
        for extent in writes:
            extent.memory.is_on_device |= is_on_device and not extent.memory.is_pinned
        if kind.launches:
            device, name = self._device, kind.name
            is_kernel = is_on_device or not self._has_host
            device.run(device.current if is_kernel else this_thread(), name, reads, writes)
            if is_on_device:
                device.kernels[name] += 1
                if kind.blocks or (kind.indexes and _is_by_mask(args)):
                    device.block_host(name, device.current.clock)
        return result


def _is_by_mask(args: tuple[Any, ...]) -> bool:
    masks = [one for one in args[1] if one is not None and one.dtype in (torch.bool, torch.uint8)]
    # One number of the host's is put everywhere where a mask is true, without counting.
    fills = len(args) > 2 and args[2].numel() == 1 and not memory_of(args[2]).is_on_device
    return bool(masks) and not (fills and len(masks) == len(args[1]) == 1)


def _tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Tensor]]:
    for key, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, Tensor):
            yield key, value
        elif isinstance(value, (list, tuple)):
            for one in value:
                if isinstance(one, Tensor):
                    yield key, one


def _seen(read: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(read)
    def seen(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if memory_of(tensor).is_on_device:
            device = here()
            device.run(device.current, read.__name__, [extent_of(tensor)], [])
            device.block_host(read.__name__, device.current.clock)
        return read(tensor, *args, **kwargs)

    return seen


@contextmanager
def host_reads_seen() -> Iterator[None]:
    """Methods that copy to the host make it wait, in all threads, which must all be ranks.

    Not by a mode: the engine runs where those that see methods are off.
    """
    for name in _COPY_TO_HOST:
        setattr(Tensor, name, _seen(getattr(Tensor, name)))
    try:
        yield
    finally:
        for name in _COPY_TO_HOST:
            # What torch's own class inherits is found again.
            delattr(Tensor, name)
