"""Sees every operation of torch as a kernel on the current simulated stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dear.torch_modes import Onlooker
from tests.streams.device import Device, Extent, extent_of, memory_of, place, told

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

_COPY_TO_HOST = ("tolist", "numpy", "cpu", "__array__")
"""Methods that do so without an operation, where the device is only simulated."""


class _Kind(NamedTuple):
    """What an operation does.

    Attributes:
        is_view: Whether it makes another view of what it is given.
        is_like: Whether it makes what is like an argument, which it does not read.
        launches: Whether there is a kernel.
        blocks: Whether the host waits for it.
        writes: Positions and names of the arguments that it writes.
    """

    is_view: bool
    is_like: bool
    launches: bool
    blocks: bool
    writes: frozenset[int | str]


@cache
def _kind_of(operation: OpOverload) -> _Kind:
    schema = operation._schema
    writes: set[int | str] = set()
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes |= {number, argument.name}
    return _Kind(
        is_view=operation.is_view,
        is_like=schema.name.endswith("_like") or schema.name.startswith("aten::new_"),
        launches=not schema.name.startswith(_READ_NOTHING),
        blocks=schema.name in _BLOCK,
        writes=frozenset(writes),
    )


class Checker(Onlooker, TorchDispatchMode):
    """A context in which kernels run on the simulated device.

    Memory is the device's if it was put there, was sent, or is made or written by an operation that
    reads what is the device's.

    Args:
        device: Of the rank whose thread enters it.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

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
            extent.memory.is_on_device |= is_on_device
        if kind.launches:
            self._launch(func, kind, reads, writes, is_on_device)
        return result

    def _launch(
        self,
        func: OpOverload,
        kind: _Kind,
        reads: list[Extent],
        writes: list[Extent],
        is_on_device: bool,
    ) -> None:
        device, name = self._device, func._schema.name.removeprefix("aten::")
        device.run(device.current, name, reads, writes)
        if is_on_device:
            device.kernels[f"{name} at {told(place())}"] += 1
            if kind.blocks:
                device.block_host(name, device.current.clock)


def _tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Tensor]]:
    for key, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, Tensor):
            yield key, value
        elif isinstance(value, (list, tuple)):
            for one in value:
                if isinstance(one, Tensor):
                    yield key, one


class HostReads(TorchFunctionMode):
    """A context in which methods that copy to the host make it wait.

    Args:
        device: Of the rank whose thread enters it.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _COPY_TO_HOST and memory_of(args[0]).is_on_device:
            device = self._device
            device.run(device.current, name, [extent_of(args[0])], [])
            device.block_host(name, device.current.clock)
        return func(*args, **(kwargs or {}))


def checked(device: Device) -> ExitStack:
    """Both contexts at once."""
    stack = ExitStack()
    stack.enter_context(HostReads(device))
    stack.enter_context(Checker(device))
    return stack
