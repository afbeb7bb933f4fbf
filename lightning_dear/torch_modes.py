"""Contexts for computations that must not depend on the contexts and settings around the caller."""

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
"""Types of devices on which an operator's pass over memory costs more than the call itself."""


def saves_calls(device: torch.device) -> bool:
    """Tells whether fewer operators are faster even if they read more memory, as on accelerators.

    Each operator is a kernel launch on an accelerator.
    """
    return device.type not in HOST_DEVICES


@contextmanager
def exact_products() -> Iterator[None]:
    """Multiplies fp32 matrices in fp32 within it, also after `set_float32_matmul_precision`."""
    backends: Any = torch.backends
    if not hasattr(backends.mkldnn, "matmul"):
        # Before torch 2.9 there is only one setting, for all devices.
        earlier = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(earlier)
        return
    settings = backends.cuda.matmul, backends.mkldnn.matmul
    before = [setting.fp32_precision for setting in settings]
    for setting in settings:
        setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        for setting, earlier in zip(settings, before, strict=True):
            setting.fp32_precision = earlier


class Onlooker:
    """Mixin of dispatch modes that observe and change no result; `plain_mode` keeps these on."""


@contextmanager
def plain_mode(device_type: str, default_dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """Turns off gradients and all contexts around the caller that would change results.

    A read of a parameter in forward may have to update it first, wherever that read is: under
    autocast, which would round; under inference mode, whose new tensors cannot be updated later;
    inside `torch.func` transforms; while a mode records operations, as for selective checkpointing;
    or under another default dtype, which optimizers use for their state. Each rank may do so at
    another place, and all must get the same result.

    Args:
        device_type: Type of the device, such as "cpu", for which autocast is turned off.
        default_dtype: torch's default dtype within the context.
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
