"""Contexts in which the caller's contexts and settings, such as autocast, do not change results."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch

from lightning_dear import private_names

_cleared_transforms = private_names.CLEARED_TRANSFORMS.imported()
_without_modes = private_names.WITHOUT_MODES.imported()
_without_torch_function = private_names.WITHOUT_TORCH_FUNCTION.imported()

HOST_DEVICES: tuple[str, ...] = ("cpu",)
"""Types of devices on which the call of an operator on a large tensor costs less than its pass over
memory."""


def saves_calls(device: torch.device) -> bool:
    """Tells whether code for `device` should call few operators, even if these read more memory.

    True on accelerators, where each operator is a kernel launch. False on a CPU.
    """
    return device.type not in HOST_DEVICES


@contextmanager
def exact_products() -> Iterator[None]:
    """Context in which fp32 matrices are multiplied in fp32, not in TF32 or bfloat16.

    It overrides `torch.set_float32_matmul_precision`, and restores the settings at its end. The
    settings are global, so that other threads are affected, too.
    """
    backends: Any = torch.backends
    with ExitStack() as stack:
        if hasattr(backends.mkldnn, "matmul"):
            for setting in (backends.cuda.matmul, backends.mkldnn.matmul):
                stack.callback(setattr, setting, "fp32_precision", setting.fp32_precision)
                setting.fp32_precision = "ieee"
        else:
            # Before torch 2.9 there is only one setting, for all devices.
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest")
        yield


class Onlooker:
    """Mixin for torch dispatch modes that only observe operators and change no result.

    `plain_mode` keeps such modes on, and turns all other dispatch modes off.
    """


@contextmanager
def plain_mode(device_type: str, default_dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """Context without gradients, in which contexts around the caller do not change results.

    If forward reads a parameter, the parameter may have to be updated first, wherever the read is:
    under autocast, which would round; under inference mode, whose new tensors cannot be updated
    later; inside `torch.func` transforms; inside a torch mode that records operations, such as for
    selective checkpointing; or under another default dtype, which optimizers would use for their
    state. The update may be at different places on different ranks, and all must get the same
    result. Modes that are an `Onlooker` stay on.

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
