"""Torch as it is outside any context, for work that happens to be done inside one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch

from lightning_dear import private_names

_cleared_transforms = private_names.CLEARED_TRANSFORMS.imported()
_without_modes = private_names.WITHOUT_MODES.imported()
_without_torch_function = private_names.WITHOUT_TORCH_FUNCTION.imported()

HOST_DEVICES: tuple[str, ...] = ("cpu",)
"""Devices on which a pass over memory costs more than the call that makes it."""


def saves_calls(device: torch.device) -> bool:
    """Whether fewer calls are worth more passes over memory: on accelerators each is a launch."""
    return device.type not in HOST_DEVICES


@contextmanager
def exact_products() -> Iterator[None]:
    """Matrices of fp32 are multiplied in fp32, also after `torch.set_float32_matmul_precision`."""
    backends: Any = torch.backends
    if not hasattr(backends.mkldnn, "matmul"):
        # Before torch 2.9 one word is for all devices.
        earlier = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(earlier)
        return
    places = backends.cuda.matmul, backends.mkldnn.matmul
    before = [one.fp32_precision for one in places]
    for one in places:
        one.fp32_precision = "ieee"
    try:
        yield
    finally:
        for one, own in zip(places, before, strict=True):
            one.fp32_precision = own


class Onlooker:
    """Mixin of dispatch modes that look on and change no result: `plain_mode` leaves them on."""


@contextmanager
def plain_mode(device_type: str, default_dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """No gradients, and none of the contexts around the caller that would change results.

    A parameter may be read, and so updated, anywhere in a forward: under autocast (which would
    round), under inference mode (whose new tensors refuse later updates), inside `torch.func`
    transforms, while a mode records operations (selective checkpointing), or under another default
    dtype (which optimizers make their state of), and on each rank elsewhere.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(default_dtype)
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, before)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device_type, enabled=False))
        stack.enter_context(_without_torch_function())
        for mode in stack.enter_context(_without_modes()):
            if isinstance(mode, Onlooker):
                stack.enter_context(cast(Any, mode))
        stack.enter_context(_cleared_transforms())
        yield
