"""Records the profile of one's own model: sizes, and how long each layer takes on this device."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_dear.telemetry.clock import Clock, clock_of
from lightning_dear.workloads.replay.ownership import owned_parameters, run_order
from lightning_dear.workloads.replay.profile import LayerProfile, ModelProfile


def record_profile(
    module: nn.Module,
    batch: Any,
    *,
    loss: Callable[[], Tensor] | None = None,
    name: str | None = None,
    num_steps: int = 10,
    num_warm_up: int = 3,
) -> ModelProfile:
    """Run forward and backward several times on one rank and profile every layer.

    A layer is a module that owns trainable parameters; its forward lasts until the next one's
    begins, its backward from the gradients of the layer after it to its own. Runs the module in
    training mode; clears its gradients, and BatchNorm statistics move.

    Args:
        module: On the device to measure, not yet wrapped or set up by a strategy.
        batch: On the same device.
        loss: Runs one forward and returns its loss. By default that is `training_step(batch, 0)`
            where the module has one, else the sum of what `module(batch)` returns.
        name: What to call the profile; None takes the class's name.
        num_steps: Steps to take medians of.
        num_warm_up: Steps before those.

    Raises:
        ValueError: If a count is too small, or a trainable parameter got no gradient.
    """
    if num_steps < 1 or num_warm_up < 0:
        raise ValueError(
            f"num_steps must be 1 or more and num_warm_up 0 or more; got {num_steps} and"
            f" {num_warm_up}."
        )
    run = loss or _default_loss(module, batch)
    was_training = module.training
    module.train()
    owned = owned_parameters(module, run_order(module, run))
    device = next(module.parameters()).device
    recorder = _Recorder(module, owned, clock_of(device))
    steps = [recorder.step(run) for _ in range(num_warm_up + num_steps)][num_warm_up:]
    module.train(was_training)
    forward = _medians([forward for forward, _ in steps])
    backward = _medians([backward for _, backward in steps])
    layers = (
        LayerProfile(
            layer or type(module).__name__,
            tuple(tuple(parameter.shape) for parameter in parameters),
            *seconds,
        )
        for (layer, parameters), *seconds in zip(owned.items(), forward, backward, strict=True)
    )
    note = f"Medians of {num_steps} steps on {_describe(device)}."
    return ModelProfile(name or type(module).__name__, "measured", note, tuple(layers))


class _Recorder:
    """Marks when layers begin in forward, and when their gradients are ready in backward."""

    def __init__(self, module: nn.Module, owned: dict[str, list[Parameter]], clock: Clock) -> None:
        self._module = module
        self._owned = owned
        self._clock = clock

    def step(self, run: Callable[[], Tensor]) -> tuple[list[float], list[float]]:
        """Run forward and backward once; return every layer's seconds in each."""
        begun: list[tuple[str, Any]] = []
        ready: dict[int, Any] = {}
        self._module.zero_grad(set_to_none=True)
        with ExitStack() as stack:
            for name, parameters in self._owned.items():
                layer = self._module.get_submodule(name)
                hook = self._note_begin(name, begun)
                stack.callback(layer.register_forward_pre_hook(hook).remove)
                for parameter in parameters:
                    leaf: Any = parameter
                    hook = self._note_ready(ready)
                    stack.callback(leaf.register_post_accumulate_grad_hook(hook).remove)
            start = self._clock.mark()
            value = run()
            middle = self._clock.mark()
            value.backward()  # type: ignore[no-untyped-call]
            end = self._clock.mark()
        self._module.zero_grad(set_to_none=True)
        seconds = self._clock.seconds
        marks = [seconds(start), *(seconds(mark) for _, mark in begun[1:]), seconds(middle)]
        forward = dict.fromkeys(self._owned, 0.0)
        for (name, _), (from_s, to_s) in zip(begun, pairwise(marks), strict=True):
            forward[name] += to_s - from_s
        at = {number: seconds(mark) for number, mark in ready.items()}
        return list(forward.values()), self._backward(at, marks[-1], seconds(end))

    def _note_begin(self, name: str, begun: list[tuple[str, Any]]) -> Callable[..., None]:
        return lambda *_: begun.append((name, self._clock.mark()))

    def _note_ready(self, ready: dict[int, Any]) -> Callable[..., None]:
        def note(parameter: Tensor) -> None:
            ready[id(parameter)] = self._clock.mark()

        return note

    def _backward(self, ready: dict[int, float], start_s: float, end_s: float) -> list[float]:
        """Cut backward where gradients were ready, as if it ran through the layers in reverse."""
        durations: list[float] = []
        reached_s = start_s
        for name, parameters in reversed(self._owned.items()):
            if not all(id(parameter) in ready for parameter in parameters):
                raise ValueError(f"A parameter of {name!r} got no gradient: freeze or remove it.")
            at_s = max(reached_s, *(ready[id(parameter)] for parameter in parameters))
            durations.append(at_s - reached_s)
            reached_s = at_s
        durations[-1] += end_s - reached_s
        return durations[::-1]


def _medians(steps: Sequence[Sequence[float]]) -> list[float]:
    """Every layer's median, scaled so that the sum is the median step's."""
    layers = [median(layer) for layer in zip(*steps, strict=True)]
    factor = median(map(sum, steps)) / (sum(layers) or 1.0)
    return [seconds * factor for seconds in layers]


def _default_loss(module: nn.Module, batch: Any) -> Callable[[], Tensor]:
    training_step: Any = getattr(module, "training_step", None)
    if training_step is None:
        return lambda: module(batch).sum()

    def run() -> Tensor:
        result = training_step(batch, 0)
        loss: Tensor = result["loss"] if isinstance(result, dict) else result
        return loss

    return run


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        return f"one {torch.cuda.get_device_name(device)}"
    return f"{torch.get_num_threads()} thread(s) of a CPU ({platform.machine()})"
