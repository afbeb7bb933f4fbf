"""Records the profile of a model: shapes of parameters, and each layer's time on this device."""

import platform
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import accumulate, count, pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dear.engine.step_timer import StepTimer
from lightning_dear.planning.measured import ModelTimes
from lightning_dear.telemetry.clock import Clock, clock_of
from lightning_dear.workloads.replay.profile import LayerProfile, ModelProfile

Owned = dict[str, list[nn.Parameter]]
"""Name of a module, in the order in which modules run -> its trainable parameters."""


def record_profile(
    module: nn.Module,
    batch: Any,
    *,
    loss: Callable[[], Tensor] | None = None,
    num_steps: int = 10,
    num_warm_up: int = 3,
) -> ModelProfile:
    """Run forward and backward several times on one rank and profile every layer.

    A layer is a module that owns trainable parameters. Its forward lasts until the next layer's
    begins. Its backward lasts from the moment when the next layer's gradients are ready to the
    moment when its own are. Runs the module in training mode, clears its gradients, and updates
    BatchNorm statistics.

    Args:
        module: Module on the device to measure, not yet wrapped or set up by a strategy.
        batch: Batch on the same device.
        loss: Runs one forward and returns its loss. None means `training_step(batch, 0)` if the
            module has one, otherwise the sum of what `module(batch)` returns.
        num_steps: Number of steps over which medians are taken.
        num_warm_up: Number of steps before these.

    Raises:
        ValueError: If a count is too small, or a trainable parameter got no gradient.
    """
    if num_steps < 1 or num_warm_up < 0:
        raise ValueError(f"num_steps={num_steps} must be >= 1 and num_warm_up={num_warm_up} >= 0.")
    run = loss or _default_loss(module, batch)
    was_training = module.training
    module.train()
    owned = owned_parameters(module, run_order(module, run))
    device = next(module.parameters()).device
    clock = clock_of(device)
    steps = [_time_step(module, owned, run, clock) for _ in range(num_warm_up + num_steps)]
    module.train(was_training)
    forward, backward = map(_medians, zip(*steps[num_warm_up:], strict=True))
    names = [layer or type(module).__name__ for layer in owned]
    shapes = [tuple(tuple(one.shape) for one in parameters) for parameters in owned.values()]
    layers = map(LayerProfile, names, shapes, forward, backward)
    note = f"Medians of {num_steps} steps on {_describe(device)}."
    return ModelProfile(type(module).__name__, "measured", note, tuple(layers))


def _time_step(
    module: nn.Module, owned: Owned, run: Callable[[], Tensor], clock: Clock
) -> tuple[list[float], list[float]]:
    """Run forward and backward once; return the seconds of every layer in forward, in backward."""
    parameters: list[Any] = [parameter for layer in owned.values() for parameter in layer]
    timer = StepTimer(module, clock)
    timer.start(parameters, {})
    module.zero_grad(set_to_none=True)
    with ExitStack() as stack:
        for index, one in enumerate(parameters):
            note = one.register_post_accumulate_grad_hook(lambda _, i=index: timer.note_gradient(i))
            stack.callback(note.remove)
        with timer.forward():
            value = run()
        with timer.backward():
            value.backward()  # type: ignore[no-untyped-call]
    timer.step_begins()
    timer.step_ends()
    module.zero_grad(set_to_none=True)
    assert timer.times is not None
    return _by_layer(owned, timer.times)


def _by_layer(owned: Owned, times: ModelTimes) -> tuple[list[float], list[float]]:
    """Divide forward's time at the layers' first uses, and backward's where gradients are ready.

    Backward is taken to run through the layers in reverse order.
    """
    numbers = count()
    begins, ends = [], []
    for name, parameters in owned.items():
        indices = [next(numbers) for _ in parameters]
        if not times.ready_s.keys() >= set(indices):
            raise ValueError(f"A parameter of {name!r} got no gradient. Freeze or remove it.")
        begins.append(min(times.first_use_s.get(index, 0.0) for index in indices))
        ends.append(max(times.ready_s[index] for index in indices))
    begins = [0.0, *accumulate(begins[1:], max), times.forward_s]
    ends = [0.0, *accumulate(ends[:0:-1], max), times.backward_s]
    forward, backward = ([end - begin for begin, end in pairwise(cuts)] for cuts in (begins, ends))
    return forward, backward[::-1]


def _medians(steps: Sequence[Sequence[float]]) -> list[float]:
    """Return the median of every layer, scaled so that they add up to the median step."""
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


def run_order(model: nn.Module, run: Callable[[], object]) -> list[str]:
    """Call `run` once; return the names of the modules that it calls, in order of first calls."""
    order: dict[str, None] = {}
    with ExitStack() as stack:
        for name, module in model.named_modules():
            note = module.register_forward_pre_hook(lambda *_, name=name: order.setdefault(name))
            stack.callback(note.remove)
        run()
    return list(order)


def owned_parameters(model: nn.Module, order: list[str]) -> Owned:
    """Return module name -> its trainable parameters, for modules that ran and have any.

    If a parameter's own module is never called (attention's output projection), the parameter
    belongs to the innermost enclosing module that ran. A shared parameter belongs to the module
    that ran first. Modules without children count as first, because a parent is called before
    its children read anything.

    Args:
        model: The whole model.
        order: Names of modules from `run_order`; the result has the same order.

    Raises:
        ValueError: If a trainable parameter is in no module that ran.
    """
    position = {name: number for number, name in enumerate(order)}
    rank = {name: (any(model.get_submodule(name).children()), position[name]) for name in order}
    paths: dict[nn.Parameter, list[str]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            paths.setdefault(parameter, []).append(path)
    owned: Owned = {name: [] for name in order}
    for parameter, own in paths.items():
        owners = [name for path in own if (name := _around(path, position)) is not None]
        if not owners:
            raise ValueError(f"{own[0]} belongs to no module that was called. Freeze or remove it.")
        owned[min(owners, key=rank.__getitem__)].append(parameter)
    return {name: own for name, own in owned.items() if own}


def _around(path: str, position: dict[str, int]) -> str | None:
    """Return the innermost module that ran and contains the parameter at `path`, or None."""
    while path:
        if (path := path.rpartition(".")[0]) in position:
            return path
    return None
