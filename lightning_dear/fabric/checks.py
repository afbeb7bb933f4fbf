"""What `Fabric(strategy="dear")` refuses beyond what a Trainer's strategy does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from lightning.fabric.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from torch.nn import Module
from torch.optim import Optimizer

from lightning_dear.compression import Compressor
from lightning_dear.fabric.module import DearModule
from lightning_dear.planning import FusionPlanner, SearchingPlanner

_PRECISIONS = (Precision, DoublePrecision, HalfPrecision, MixedPrecision)


def check_fabric_precision(precision: Precision) -> None:
    """Refuses precision plug-ins that replace layers or parameters.

    Raises:
        ValueError: Naming the plug-in and the precisions that work.
    """
    if type(precision) not in _PRECISIONS:
        raise ValueError(
            f"{type(precision).__name__} (precision={precision.precision!r}) does not work under"
            " strategy='dear': it keeps layers or parameters of its own, which cannot be sharded."
            " Use '32-true', 'bf16-mixed', '16-mixed', 'bf16-true', '16-true' or '64-true', or"
            " strategy='ddp'."
        )


def check_no_schedule(codec: Compressor | None) -> None:
    """Refuses a codec that changes with the steps, which Fabric does not count.

    Raises:
        ValueError: Naming the option.
    """
    if getattr(codec, "warm_up_steps", 0):
        raise ValueError(
            "warm_up_steps of dgc needs a Trainer, which counts steps; under Fabric leave it out."
        )


def check_no_search(fusion: FusionPlanner) -> None:
    """Refuses planners that measure steps: only Lightning's Trainer says where a step ends.

    Raises:
        ValueError: Naming what to use.
    """
    if isinstance(fusion, SearchingPlanner):
        raise ValueError(
            f"fusion={getattr(fusion, 'name', type(fusion).__name__)!r} measures training steps,"
            " which works under a Trainer only. Use fusion='threshold', or a plan that a Trainer"
            " has found: strategy.save_plan(path) there, fusion=FixedPlan(path) here."
        )


def check_apart(module: Module, trained: Sequence[DearModule]) -> None:
    """Refuses a module that has parameters in common with another one that is being trained.

    Raises:
        ValueError: Naming a parameter and what to do.
    """
    owner = {id(p): one for one in trained for p in one.module.parameters()}
    for name, parameter in module.named_parameters():
        if id(parameter) in owner:
            other = type(owner[id(parameter)].module).__name__
            raise ValueError(
                f"'{name}' of this {type(module).__name__} is a parameter of the {other} that was"
                " set up before, and strategy='dear' trains each parameter in one place. Set up one"
                " module that holds both, with all optimizers: fabric.setup(module, *optimizers)."
            )


def check_have_optimizer(module: Module, trained: Sequence[DearModule]) -> None:
    """Refuses gradients in a module that was set up without an optimizer.

    Raises:
        RuntimeError: Naming a parameter and what to do.
    """
    for name, parameter in module.named_parameters():
        if parameter.grad is None:
            continue
        if any(parameter is own for one in trained for own in one.module.parameters()):
            continue
        raise RuntimeError(
            f"'{name}' of a {type(module).__name__} that was set up without an optimizer has a"
            " gradient, which strategy='dear' would not average over ranks. To train it, set up"
            " both together: model, optimizer = fabric.setup(model, optimizer). Otherwise call it"
            " under torch.no_grad() or freeze it: module.requires_grad_(False)."
        )


def refuse_lone_optimizer(optimizer: Optimizer) -> NoReturn:
    """Refuses an optimizer without its module.

    Raises:
        RuntimeError: Always, saying what to call.
    """
    raise RuntimeError(
        f"strategy='dear' must know the model and its {type(optimizer).__name__} together, since it"
        " steps on shards of the model's parameters: call model, optimizer ="
        " fabric.setup(model, optimizer) in place of setup_module and setup_optimizers."
    )
