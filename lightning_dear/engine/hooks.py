"""The engine's hooks, in their places among those that others register, whenever they do."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakMethod

from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim import optimizer as all_optimizers
from torch.utils.hooks import RemovableHandle

from lightning_dear import private_names
from lightning_dear.optimizers.sharded import is_nested

OnGradient = Callable[[int, tuple[()], tuple[Tensor | None]], None]
"""(number of a parameter, nothing, its gradient of this backward alone, or None) -> None."""


class GradientHooks:
    """Is called for each gradient behind everybody else's hooks, as DistributedDataParallel is.

    When a parameter gets a gradient, torch calls the tensor's hooks, adds the gradient to `.grad`,
    and calls the post-accumulate hooks. Then come the hooks of the parameter's `AccumulateGrad`
    node, and ours is one of these. So the others see this rank's own gradient, and what they do to
    it counts.

    Args:
        parameters: Have the hooks until `remove`, also while they are frozen.
        on_gradient: What is called.
    """

    def __init__(self, parameters: Sequence[Parameter], on_gradient: OnGradient) -> None:
        self._parameters: Sequence[Any] = parameters
        frozen = [parameter for parameter in parameters if not parameter.requires_grad]
        # Held here, since a parameter does not hold its own.
        self._nodes = [get_gradient_edge(one.requires_grad_()).node for one in parameters]
        for parameter in frozen:
            parameter.requires_grad_(False)
        nodes = enumerate(self._nodes)
        self._hooks = [node.register_hook(partial(on_gradient, number)) for number, node in nodes]
        self._lists: list[Any] = [private_names.HOOKS_OF_HANDLE.of(hook)() for hook in self._hooks]

    def stay_last(self) -> None:
        """Moves ours behind hooks that others have registered at the same nodes since."""
        if max(map(len, self._lists), default=0) > 1:
            for hook, hooks in zip(self._hooks, self._lists, strict=True):
                # Not by `move_to_end`: autograd does not look at an OrderedDict's own order.
                hooks[hook.id] = hooks.pop(hook.id)

    def refuse_another_sum(self) -> None:
        """Refuses another backward of a step, if hooks would not see in `.grad` what DDP shows.

        Raises:
            RuntimeError: If a parameter has a post-accumulate hook.
        """
        if any(map(private_names.POST_ACCUMULATE_GRAD_HOOKS.of, self._parameters)):
            raise RuntimeError(
                "A second backward came before the step, and a parameter has a"
                " post-accumulate-grad hook, which would see another sum than under DDP: the first"
                " gradients are not averaged yet. Add up the losses, or run all backwards of a step"
                " but the last in `with trainer.strategy.block_backward_sync():`, or `with"
                " fabric.no_backward_sync(model):`."
            )

    def remove(self) -> None:
        """Takes the hooks away. Idempotent."""
        for hook in self._hooks:
            hook.remove()


class StepHooks:
    """The engine's hooks around one optimizer's `step`, and whether others have some, too.

    torch calls pre-hooks that all optimizers have in common, the optimizer's own ones, the step,
    its own post-hooks, and common ones. Others' pre-hooks are called between `before` and `begin`,
    and see the user's parameters in the groups. Others' post-hooks come after `end`.

    Args:
        optimizer: Has the hooks until `remove`.
        before: Called in front of all pre-hooks.
        begin: Called behind all pre-hooks, and behind the closure if there is one.
        end: Called in front of all post-hooks, with torch's arguments.
    """

    def __init__(self, optimizer: Optimizer, before: Any, begin: Any, end: Any) -> None:
        self._optimizer, self._before = optimizer, before
        first = before_every_step(self._on_step)
        last = optimizer.register_step_post_hook(partial(_unless_nested, end))
        behind = partial(_behind_closure, begin)
        self._begin = optimizer.register_step_pre_hook(partial(_unless_nested, behind))
        self._handles = first, self._begin, last
        unused = all_optimizers.register_optimizer_step_post_hook(end)
        self._lists: list[Any] = [
            private_names.HOOKS_OF_HANDLE.of(one)() for one in (*self._handles, unused)
        ]
        unused.remove()
        for place, hook in (0, first), (2, last):
            self._lists[place].move_to_end(hook.id, last=False)

    def _on_step(self, optimizer: Optimizer) -> None:
        # `inner_step` takes the optimizer's own hooks away, but not those of all optimizers.
        is_inner = vars(optimizer).get(private_names.STEP_PRE_HOOKS.name) is not self._lists[1]
        if optimizer is self._optimizer and not is_inner and not is_nested(optimizer):
            self._lists[1].move_to_end(self._begin.id)
            self._before()

    @property
    def are_in_front(self) -> bool:
        """Whether somebody has pre-hooks who is not the engine."""
        ours = 1 + sum(getattr(hook, "func", None) is _call for hook in self._lists[0].values())
        return len(self._lists[0]) + len(self._lists[1]) > ours

    @property
    def are_behind(self) -> bool:
        """Whether somebody else has post-hooks."""
        return len(self._lists[2]) + len(self._lists[3]) > 1

    def remove(self) -> None:
        """Takes the hooks away. Idempotent."""
        for handle in self._handles:
            handle.remove()


def before_every_step(method: Callable[[Optimizer], None]) -> RemovableHandle:
    """Calls a bound method before each step of any optimizer, while its object is there."""
    # torch would hold for ever whoever is not removed.
    on_step = partial(_call, WeakMethod(method))
    return all_optimizers.register_optimizer_step_pre_hook(on_step)


def _unless_nested(hook: Any, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    return None if is_nested(optimizer) else hook(optimizer, args, kwargs)


def _behind_closure(begin: Callable[[], None], optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Pre-hook of `step`: calls `begin` after the closure, whether or not there is one."""
    this, *rest = args
    closure = rest[0] if rest else kwargs.get("closure")
    if closure is None:
        begin()
        return None

    was_called = False

    def closure_then_step() -> Any:
        nonlocal was_called
        if was_called:
            raise RuntimeError(
                f"{type(optimizer).__name__} calls its closure more than once in a step, which"
                " strategy='dear' does not do; use strategy='ddp'."
            )
        was_called = True
        loss = closure()
        begin()
        return loss

    if rest:
        return (this, closure_then_step, *rest[1:]), kwargs
    return args, {**kwargs, "closure": closure_then_step}


def _call(method: Any, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if (on_step := method()) is not None:
        on_step(optimizer)


def warn_of_hooks(optimizer: Optimizer) -> None:
    """Warns that `.grad` is None in hooks that somebody has registered."""
    warnings.warn(
        f"Hooks of the step of {type(optimizer).__name__} find no gradient in .grad under"
        " strategy='dear'. What needs it belongs into on_before_optimizer_step, or before the step"
        " into `with strategy.whole_gradients():`. If nothing does, pass"
        " DearStrategy(gradients_in_hooks=False).",
        stacklevel=2,
    )


def warn_of_leftovers(optimizer: Optimizer) -> None:
    """Warns, once, that gradients of the step before would still count under plain torch."""
    warnings.warn(
        f"{type(optimizer).__name__}.zero_grad() was not called since its last step. Under"
        " strategy='dear' what a step has used is forgotten, not added to. If adding is meant,"
        " accumulate before the step; if gradients are cleared in another way, call zero_grad() to"
        " be rid of this warning.",
        stacklevel=2,
    )
