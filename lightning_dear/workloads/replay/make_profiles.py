"""Makes the profiles in `profiles/` from the models' real definitions and counted operations.

    python -m lightning_dear.workloads.replay.make_profiles [NAME ...]

Needs the extras `[vision,text]`. Nothing is computed: models and inputs have shapes only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lightning_dear.workloads.replay.definitions import DEFINITIONS, Definition
from lightning_dear.workloads.replay.ownership import owned_parameters, run_order
from lightning_dear.workloads.replay.profile import FOLDER, LayerProfile, ModelProfile

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
    """Adds up the modelled seconds of every operation under the layer that runs.

    Args:
        model: Whose modules are called.
        names: Modules that are layers, in the order of forward; operations between two of them
            count for the earlier one, those before the first for the first.

    Attributes:
        seconds: Layer -> seconds.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds = dict.fromkeys(names, 0.0)
        self._running = next(iter(self.seconds))
        for name in self.seconds:
            model.get_submodule(name).register_forward_pre_hook(self._enter(name))

    def _enter(self, name: str) -> Callable[[nn.Module, Any], None]:
        def enter(module: nn.Module, args: Any) -> None:
            self._running = name

        return enter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seconds[self._running] += _operation_s(func, args, kwargs or {}, result)
        return result


def _operation_s(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Seconds of one operation; views and making an input cost nothing."""
    infos = [value.alias_info for value in func._schema.returns]
    read = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    if not read or any(info is not None and not info.is_write for info in infos):
        return 0.0
    written = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
    nbytes = sum(value.numel() * value.element_size() for value in read + written)
    count = flop_registry.get(func._overloadpacket)
    flops = count(*args, **kwargs, out_val=result) if count is not None else 0
    return max(flops / FLOPS_PER_S, nbytes / BYTES_PER_S)


def profile_of(name: str, definition: Definition) -> ModelProfile:
    """Build and run the model on the meta device and profile its trainable parameters."""
    with torch.device("meta"):
        model = definition.build()
        model.train()
        owned = owned_parameters(model, run_order(model, lambda: definition.run(model)))
        timer = OperationTimer(model, owned)
        with timer:
            definition.run(model)
    layers = (
        LayerProfile(
            layer,
            tuple(tuple(parameter.shape) for parameter in owned[layer]),
            forward_s,
            BACKWARD_OVER_FORWARD * forward_s,
        )
        for layer, forward_s in timer.seconds.items()
    )
    note = NOTE.format(what=definition.what, source=definition.source)
    return ModelProfile(name, "flops", note, tuple(layers))


def main(names: list[str]) -> None:
    """Write the named profiles, or all."""
    for name in names or DEFINITIONS:
        profile = profile_of(name, DEFINITIONS[name])
        profile.save(FOLDER / f"{name}.json")
        print(
            f"{name}: {len(profile.layers)} layers, {profile.num_tensors} tensors,"
            f" {profile.num_parameters:,} parameters, forward {profile.forward_s * 1e3:.1f} ms,"
            f" backward {profile.backward_s * 1e3:.1f} ms"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
