"""A network that stands for one that computes longer."""

from time import perf_counter, sleep
from typing import Any

from hydra.utils import get_class
from torch import nn


def padded(seconds: float, network: str, **options: Any) -> nn.Module:
    """Return `network(**options)`, whose steps of training compute for about `seconds`.

    Its numbers are unchanged: the forward sleeps for what is left, if the backward takes twice as
    long as itself.
    """
    module: nn.Module = get_class(network)(**options)
    begins: list[float] = []
    module.register_forward_pre_hook(lambda *_: begins.append(perf_counter()))

    def pad(module: nn.Module, *_: Any) -> None:
        left = seconds - 3 * (perf_counter() - begins.pop())
        sleep(max(0.0, left) if module.training else 0.0)

    module.register_forward_hook(pad)
    return module
