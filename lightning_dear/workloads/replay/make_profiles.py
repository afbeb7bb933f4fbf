"""Makes the profiles in `profiles/` from the models' real definitions and counted operations.

    python -m lightning_dear.workloads.replay.make_profiles [NAME ...]

Needs the extras `[vision,text]`. Nothing is computed: models and inputs have shapes only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lightning_dear.workloads.replay.definitions import DEFINITIONS, Definition
from lightning_dear.workloads.replay.profile import _FOLDER, LayerProfile, ModelProfile

FLOPS_PER_S = 7e12
BYTES_PER_S = 5e11
BACKWARD_OVER_FORWARD = 2.0
NOTE = (
    "{what} An operation takes the longer of its floating-point operations at 7 TFLOP/s and the"
    " bytes it reads and writes at 500 GB/s (about half of the fp32 peak and most of the memory"
    " rate of an RTX 2080 Ti class GPU: a model of the time, not a measurement); backward is twice"
    " the forward, layer by layer. Sizes from {source}."
)


class OperationTimer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the modelled seconds of every operation under the module that runs.

    Args:
        model: Its modules that own parameters are told apart; operations between two of them
            count for the earlier one.

    Attributes:
        seconds: Module name -> seconds, in the order of the modules' first forward.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds: dict[str, float] = {}
        self._running = ""
        self._pending_s = 0.0
        for name, module in model.named_modules():
            if module._parameters:
                module.register_forward_pre_hook(self._enter(name))

    def _enter(self, name: str) -> Callable[[nn.Module, Any], None]:
        def enter(module: nn.Module, args: Any) -> None:
            self._running = name
            self.seconds.setdefault(name, 0.0)
            self.seconds[name] += self._pending_s
            self._pending_s = 0.0

        return enter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        spent_s = _operation_s(func, args, kwargs or {}, result)
        if self._running:
            self.seconds[self._running] += spent_s
        else:
            self._pending_s += spent_s
        return result


def _operation_s(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    infos = [value.alias_info for value in func._schema.returns]
    if any(info is not None and not info.is_write for info in infos):
        return 0.0
    nbytes = sum(
        value.numel() * value.element_size()
        for value in tree_leaves((args, kwargs, result))
        if isinstance(value, Tensor)
    )
    count = flop_registry.get(func._overloadpacket)
    flops = count(*args, **kwargs, out_val=result) if count is not None else 0
    return max(flops / FLOPS_PER_S, nbytes / BYTES_PER_S)


def profile_of(name: str, definition: Definition) -> ModelProfile:
    """Build and run the model on the meta device and profile its trainable parameters."""
    with torch.device("meta"):
        model = definition.build()
        model.train()
        timer = OperationTimer(model)
        with timer:
            definition.run(model)
    note = NOTE.format(what=definition.what, source=definition.source)
    return ModelProfile(name, "flops", note, tuple(_layers(model, timer.seconds)))


def _layers(model: nn.Module, seconds: dict[str, float]) -> Iterator[LayerProfile]:
    """Layers that own trainable parameters; the time of others goes to the layer before."""
    owned = _owned_shapes(model, list(seconds))
    waiting: LayerProfile | None = None
    early_s = 0.0
    for name, forward_s in seconds.items():
        shapes = owned[name]
        if not shapes and waiting is None:
            early_s += forward_s
            continue
        if not shapes:
            assert waiting is not None
            forward_s += waiting.forward_s
            name, shapes = waiting.name, waiting.shapes
        elif waiting is not None:
            yield waiting
        waiting = _layer(name, shapes, forward_s + early_s)
        early_s = 0.0
    assert waiting is not None
    yield waiting


def _layer(name: str, shapes: tuple[tuple[int, ...], ...], forward_s: float) -> LayerProfile:
    return LayerProfile(name, shapes, forward_s, BACKWARD_OVER_FORWARD * forward_s)


def _owned_shapes(model: nn.Module, order: list[str]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Module name -> shapes; a shared parameter goes to its first user, leaves before parents."""
    claimed: set[int] = set()
    owned = {}
    is_parent = {name: any(model.get_submodule(name).children()) for name in order}
    for name in sorted(order, key=lambda name: is_parent[name]):
        shapes = []
        for parameter in model.get_submodule(name)._parameters.values():
            if parameter is not None and parameter.requires_grad and id(parameter) not in claimed:
                claimed.add(id(parameter))
                shapes.append(tuple(parameter.shape))
        owned[name] = tuple(shapes)
    trainable = [p for p in model.parameters() if p.requires_grad]
    missing = len(trainable) - len(claimed)
    if missing:
        raise RuntimeError(f"{missing} trainable parameters belong to no module that ran.")
    return owned


def main(names: list[str]) -> None:
    """Write the named profiles, or all."""
    for name in names or DEFINITIONS:
        profile = profile_of(name, DEFINITIONS[name])
        profile.save(_FOLDER / f"{name}.json")
        print(
            f"{name}: {len(profile.layers)} layers, {profile.num_tensors} tensors,"
            f" {profile.num_parameters:,} parameters, forward {profile.forward_s * 1e3:.1f} ms,"
            f" backward {profile.backward_s * 1e3:.1f} ms"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
