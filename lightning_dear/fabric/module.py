"""Wraps a module in `fabric.setup`, as "ddp" does with DistributedDataParallel."""

import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from lightning.fabric.wrappers import is_wrapped
from torch import nn, optim
from typing_extensions import override

from lightning_dear import planning, private_names
from lightning_dear.callbacks.fusion_tuner import option_of
from lightning_dear.collectives.work import under_way
from lightning_dear.engine import step, step_state, training
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.local_steps import OuterHalf
from lightning_dear.strategy.base import meanwhile

_PART = "_lightning_dear_part"
"""Name of the attribute in which an optimizer that was set up has its `OptimizerPipeline`."""

_training: "weakref.WeakSet[DearModule]" = weakref.WeakSet()
"""Modules of this process that were set up with an optimizer and still exist."""


class DearModule(nn.Module):
    """Wraps a module, and trains it through a pipeline. `fabric.setup` returns it to the user.

    Forwards with gradients run in the pipeline. Other forwards wait for all parameters first.

    Training ends when this object is deleted, in `end`, and when the module is set up again. Then
    the module is an ordinary module again, with the new values. Its optimizers raise in `step`
    until they are set up again. If it is deleted between backward and step, a warning says that the
    gradients are dropped.

    Args:
        module: The user's module.
        pipeline: Pipeline of the module. None means that it was set up without an optimizer, so
            that forwards are the module's own.
        outer: Outer half of the pipeline. None means that there are no local steps.

    Attributes:
        outer: Same as the argument. Without local steps it does nothing.
        has_run: Whether a training forward has run since the last step of any of its optimizers.
        is_sync_blocked: Whether a `no_sync` block is entered, so that backwards send nothing.
    """

    def __init__(
        self, module: nn.Module, pipeline: Pipeline | None = None, outer: OuterHalf | None = None
    ) -> None:
        super().__init__()
        self.outer = outer or OuterHalf()
        self.module = module
        self.pipeline = pipeline
        self.has_run = False
        self.is_sync_blocked = False
        self._was_called = False
        self._ending: Any = None
        if pipeline is not None:
            self.take(pipeline, self.outer)
            _training.add(self)

    def take(self, pipeline: Pipeline, outer: OuterHalf) -> None:
        """Trains through these from now on. An earlier pipeline must have been detached."""
        if self._ending is not None:
            self._ending.detach()
        self.pipeline, self.outer = pipeline, outer
        self._ending = weakref.finalize(self, _end_deleted, pipeline, outer)
        self._ending.atexit = False
        for part in pipeline.parts:
            _claim(part)

    # Only this method is not traced. Compiled modules inside still run compiled.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own forward.

        With gradients, each read of a parameter waits for that parameter. Without gradients (under
        `torch.no_grad`, or if all trained parameters are frozen) it first blocks until all
        parameters are complete. Without a pipeline it waits for nothing. With local steps the
        module reads the anchor in evaluation mode (`eval()`) without gradients, else the replica.

        Raises:
            RuntimeError: In the first call, if Fabric has compiled this object instead of the
                module.
        """
        if not self._was_called:
            self._refuse_compiling()
            self._was_called = True
        if self.pipeline is None:
            return self.module(*args, **kwargs)
        trained = (p for part in self.pipeline.parts for p in part.parameters)
        if not (torch.is_grad_enabled() and any(p.requires_grad for p in trained)):
            self.pipeline.complete_parameters("evaluation")
            show = self.outer.show_replica if self.module.training else self.outer.show_anchor
            show()
            return self.module(*args, **kwargs)
        self.outer.show_replica()
        with self.pipeline.forward(synchronize=not self.is_sync_blocked):
            output = self.module(*args, **kwargs)
        self.has_run = True
        return output

    def _refuse_compiling(self) -> None:
        # Fabric compiles the module that the strategy returns, without telling the strategy. The
        # compiled module refers to this one, which the garbage collector can find.
        holders = (holder for holder in gc.get_referrers(self) if isinstance(holder, dict))
        if any(holder.get(private_names.ORIGINAL_MODULE.name) is self for holder in holders):
            raise RuntimeError(
                "Fabric has put torch.compile around what strategy='dear' adds to the model, which"
                " cannot be compiled. Compile the model in place: call model.compile() in place of"
                " torch.compile(model), or fabric.setup(..., _reapply_compile=False)."
            )

    def no_sync(self) -> AbstractContextManager[None]:
        """A context whose backwards accumulate gradients locally and send nothing."""
        return meanwhile(self, is_sync_blocked=True)

    def trains(self, optimizer: optim.Optimizer) -> bool:
        """Tells whether `optimizer` trains this module."""
        return self.pipeline is not None and optimizer in self.pipeline.optimizers

    def end(self) -> None:
        """Ends the training now. Blocks until the last step's parameters are complete.

        Collective if gradients were launched that no step has used. Does nothing without a
        training.
        """
        if self.pipeline is not None and self._ending.detach():
            _end_of(self.pipeline, self.outer)
            self.pipeline = None

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the pipeline, so that copies and unpickled objects are for inference only."""
        return {**self.__dict__, "pipeline": None, "outer": OuterHalf(), "_ending": None}


def part_of(optimizer: optim.Optimizer) -> step.OptimizerPipeline | None:
    """Returns the `OptimizerPipeline` of an optimizer, also after its training.

    None means that the optimizer was not set up with a model.
    """
    part: step.OptimizerPipeline | None = getattr(optimizer, _PART, None)
    return part


def finish_at_exit() -> None:
    """Blocks until the last step's all-gathers are done, so that all ranks have all parameters.

    It waits for all modules that this process trains, and warns if an all-gather fails, or if local
    steps were not finished. Does nothing if an uncaught exception ends the process: other ranks may
    never send their part.
    """
    # Python sets `sys.last_value` when it prints an uncaught exception.
    if getattr(sys, "last_value", None) is not None:
        return
    for module in list(_training):
        module.outer.warn_of_lost_steps()
        if module.pipeline is not None:
            try:
                module.pipeline.complete_parameters("exit")
            except (RuntimeError, ValueError) as error:
                warnings.warn(
                    f"The last step's parameters did not all arrive ({error}). Use the last"
                    " checkpoint: the weights of any rank may be a mixture of two steps.",
                    stacklevel=2,
                )


def finishing(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns the result of `function`, and calls `finish_at_exit` after it.

    For processes that run no exit handlers. If `function` raises, `finish_at_exit` is not called.
    """
    result = function(*args, **kwargs)
    finish_at_exit()
    return result


def _end_deleted(pipeline: Pipeline, outer: OuterHalf) -> None:
    """Ends the training of a `DearModule` that was deleted, perhaps by the garbage collector.

    It runs at another time on each rank. So it launches nothing, and waits only for gathers, which
    all ranks have launched. Gradients that were launched and not waited for are dropped.
    """
    if any(part.progress.state is step_state.StepState.SENDING for part in pipeline.parts):
        warnings.warn(
            "A model that fabric.setup returned was deleted between backward and step, so its"
            " gradients are dropped. Before you delete it, call optimizer.step() or"
            " optimizer.zero_grad() on all ranks.",
            stacklevel=2,
        )
        active = [part.plans.active for part in pipeline.parts if part.plans.active is not None]
        # gloo could receive no later message if the memory of this one were freed.
        under_way.append((pipeline.collectives, [one.round.launched for one in active]))
        pipeline.abandon()
    _end_of(pipeline, outer)


def _end_of(pipeline: Pipeline, outer: OuterHalf) -> None:
    outer.detach()
    try:
        pipeline.detach()
    except RuntimeError:
        pipeline.abandon()
        pipeline.detach()  # After `abandon` it warns instead of raising.
    for part in pipeline.parts:
        _disown(part)


# --- checks that only Fabric needs ----------------------------------------------------------------


def check_without_trainer(fusion: planning.FusionPlanner) -> None:
    """Refuses planners that measure steps. Only a Trainer tells them where a step ends.

    Raises:
        ValueError: If `fusion` is such a planner.
    """
    if isinstance(fusion, planning.SearchingPlanner):
        raise ValueError(
            f"{option_of(fusion)} measures training steps, which works under a Trainer only. Use"
            " fusion='threshold', or a plan that a Trainer has found: strategy.save_plan(path)"
            " there, fusion=FixedPlan(path) here."
        )


def check_apart(module: nn.Module, trained: Sequence[DearModule]) -> None:
    """Refuses a module that shares parameters with a module that is being trained.

    Args:
        module: Module to be set up.
        trained: Modules that are being trained.

    Raises:
        ValueError: If they share a parameter. The message names it.
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


def check_have_optimizer(module: nn.Module, trained: Sequence[DearModule]) -> None:
    """Refuses gradients in a module that was set up without an optimizer.

    Args:
        module: Module that was set up without an optimizer.
        trained: Modules that are being trained, which may share its parameters.

    Raises:
        RuntimeError: If a parameter that is in none of `trained` has a gradient.
    """
    own = {id(parameter) for one in trained for parameter in one.module.parameters()}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and id(parameter) not in own:
            raise RuntimeError(
                f"'{name}' of a {type(module).__name__} that was set up without an optimizer has a"
                " gradient, which strategy='dear' would not average over ranks. To train it, set up"
                " both together: model, optimizer = fabric.setup(model, optimizer). Otherwise call"
                " it under torch.no_grad() or freeze it: module.requires_grad_(False)."
            )


# --- optimizers -----------------------------------------------------------------------------------


def _claim(part: step.OptimizerPipeline) -> None:
    """Stores `part` in its optimizer, and changes the optimizer's class. Mutates the optimizer.

    The new class is a subclass of `_ZeroGradReachesInner` and of the old class, with the old
    class's name. If an earlier training has ended, `step` no longer raises.
    """
    optimizer, kind = part.optimizer, type(part.optimizer)
    setattr(optimizer, _PART, part)
    for hook in optimizer.__dict__.pop(training.REFUSALS, ()):
        hook.remove()
    if not issubclass(kind, _ZeroGradReachesInner):
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        optimizer.__class__ = type(kind.__name__, (_ZeroGradReachesInner, kind), names)


class _ZeroGradReachesInner(optim.Optimizer):
    """Makes `zero_grad` of Fabric's optimizer wrapper call `zero_grad` of the optimizer inside.

    An optimizer's class gets this base as long as the optimizer is trained. The class of Fabric's
    wrapper derives from the optimizer's class. Without this base the wrapper would run the class's
    `zero_grad` on itself, and not the `zero_grad` that the pipeline has assigned to the optimizer
    inside.
    """

    @override
    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if is_wrapped(self):
            self.optimizer.zero_grad(*args, **kwargs)  # type: ignore[attr-defined]
        else:
            super().zero_grad(*args, **kwargs)


def _disown(part: step.OptimizerPipeline) -> None:
    optimizer, kind = part.optimizer, type(part.optimizer)
    if issubclass(kind, _ZeroGradReachesInner):
        optimizer.__class__ = kind.__mro__[2]
    optimizer.__dict__[training.REFUSALS] = [optimizer.register_step_pre_hook(_refuse_step)]


def _refuse_step(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> NoReturn:
    raise RuntimeError(
        f"The training of this {type(optimizer).__name__}'s parameters has ended: what fabric.setup"
        " returned for the model is gone, or the model was set up again. Keep what the last"
        " `model, optimizer = fabric.setup(model, optimizer)` returned, and use both of them."
    )
