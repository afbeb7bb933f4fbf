"""The engine's hooks of gradients and steps, kept before or after the hooks of other code."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakMethod

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer
from torch.optim import optimizer as all_optimizers
from torch.utils.hooks import RemovableHandle

from lightning_dear import private_names
from lightning_dear.optimizers.sharded import is_nested

OnGradient = Callable[[int, tuple[()], tuple[Tensor | None]], None]
"""Hook that is called after a backward has added a gradient to a parameter's `.grad`. Its arguments
are the parameter index, an empty tuple, and a tuple of one element: what this accumulation has
added, or None if the backward has no gradient for the parameter."""


class GradientHooks:
    """Calls a function for each new gradient, after all hooks of other code, as DDP does.

    When a parameter gets a gradient, torch calls the tensor's hooks, adds the gradient to `.grad`,
    and calls the post-accumulate hooks. Then it calls hooks of the parameter's `AccumulateGrad`
    node, of which the engine's hook is one. So other hooks see this rank's own gradient, and their
    changes to it are reduced.

    Args:
        parameters: Parameters that have the hook until `remove`, also while they are frozen.
        on_gradient: The function that is called, in autograd's thread.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], on_gradient: OnGradient) -> None:
        self._parameters: Sequence[Any] = parameters
        frozen = [parameter for parameter in parameters if not parameter.requires_grad]
        # Nodes are held here, since a parameter does not keep its node alive. A node that is freed
        # would take the hook with it.
        self._nodes = [get_gradient_edge(one.requires_grad_()).node for one in parameters]
        for parameter in frozen:
            parameter.requires_grad_(False)
        nodes = enumerate(self._nodes)
        self._hooks = [node.register_hook(partial(on_gradient, number)) for number, node in nodes]
        self._lists: list[Any] = [private_names.HOOKS_OF_HANDLE.of(hook)() for hook in self._hooks]

    def stay_last(self) -> None:
        """Moves these hooks behind hooks that were registered at the same nodes since.

        To be called before each backward. Does nothing if no node has another hook.
        """
        if max(map(len, self._lists), default=0) > 1:
            for hook, hooks in zip(self._hooks, self._lists, strict=True):
                # `OrderedDict.move_to_end` would not do: autograd iterates in C, which follows the
                # order of insertion.
                hooks[hook.id] = hooks.pop(hook.id)

    def refuse_another_sum(self) -> None:
        """Refuses post-accumulate hooks in a second backward of a step.

        To be called before that backward, if DDP would have averaged gradients after the first one.
        The hook would see another `.grad` than under DDP, since the engine has averaged nothing.

        Raises:
            RuntimeError: If a parameter has a post-accumulate hook. Otherwise nothing happens.
        """
        if any(map(private_names.POST_ACCUMULATE_GRAD_HOOKS.of, self._parameters)):
            raise RuntimeError(
                "A second backward came before the step, and a parameter has a post-accumulate-grad"
                " hook. Add up the losses, or run all backwards of a step but the last in"
                " `with trainer.strategy.block_backward_sync():`, or `with"
                " fabric.no_backward_sync(model):`. The hook would see another sum than under DDP,"
                " which has averaged the first gradients by then."
            )

    def remove(self) -> None:
        """Removes the hooks. Idempotent."""
        for hook in self._hooks:
            hook.remove()


class StepHooks:
    """The engine's hooks around one optimizer's `step`.

    In each step torch calls, in this order: pre-hooks of all optimizers (registered for the whole
    process), pre-hooks of this optimizer, the step, post-hooks of this optimizer, and post-hooks of
    all optimizers. Pre-hooks of other code are called between `before` and `begin`, and see the
    user's parameters in the parameter groups. Post-hooks of other code are called after `end`.
    Nothing is called for a `super().step()` within a step, see `is_nested`.

    Args:
        optimizer: The optimizer. It has the hooks until `remove`.
        before: Called before the pre-hooks of other code.
        begin: Called after all pre-hooks, and after the closure if there is one.
        end: Called before the post-hooks of other code, with torch's arguments.
    """

    def __init__(self, optimizer: Optimizer, before: Any, begin: Any, end: Any) -> None:
        self._optimizer, self._before = optimizer, before
        self._told = set[str]()
        first = before_every_step(self._on_step)
        last = optimizer.register_step_post_hook(partial(_unless_nested, end))
        behind = partial(_behind_closure, begin)
        self._front = optimizer.register_step_pre_hook(partial(_unless_nested, self._in_front))
        self._begin = optimizer.register_step_pre_hook(partial(_unless_nested, behind))
        self._handles = first, self._front, self._begin, last
        unused = all_optimizers.register_optimizer_step_post_hook(end)
        handles = first, self._begin, last, unused
        self._lists: list[Any] = [private_names.HOOKS_OF_HANDLE.of(one)() for one in handles]
        unused.remove()
        for place, hook in (0, first), (2, last):
            self._lists[place].move_to_end(hook.id, last=False)

    def _on_step(self, optimizer: Optimizer) -> None:
        # Hook of all optimizers, called before every step. `inner_step` replaces the hooks of this
        # optimizer while it steps shards, but not the hooks of all optimizers.
        is_inner = vars(optimizer).get(private_names.STEP_PRE_HOOKS.name) is not self._lists[1]
        if optimizer is self._optimizer and not is_inner and not is_nested(optimizer):
            self._lists[1].move_to_end(self._front.id, last=False)
            self._lists[1].move_to_end(self._begin.id)
            if self._are_in_front_of_all:
                self._before()

    def _in_front(self, *_: Any) -> None:
        # `before` may block. While it does, other threads, or the end of another training, may
        # change the list of hooks of all optimizers, over which torch would still iterate.
        if not self._are_in_front_of_all:
            self._before()

    @property
    def _are_in_front_of_all(self) -> bool:
        hooks = self._lists[0].values()
        return any(getattr(hook, "func", None) is not _call for hook in hooks)

    @property
    def are_in_front(self) -> bool:
        """Whether other code has pre-hooks of `step`: of this optimizer, or of all optimizers."""
        return len(self._lists[1]) > 2 or self._are_in_front_of_all

    @property
    def are_behind(self) -> bool:
        """Whether other code has post-hooks of `step`: of this optimizer, or of all optimizers."""
        return len(self._lists[2]) + len(self._lists[3]) > 1

    def warn_once(self, *, shows: bool, costs: bool) -> None:
        """Warns of what hooks of other code find in `.grad`, each thing once.

        Args:
            shows: Whether pre-hooks find the mean gradient in this step. If not, they find None.
            costs: Whether it was gathered for them.
        """
        kind, said = type(self._optimizer).__name__, []
        if costs:
            said.append(
                "strategy='dear' gathers the mean gradient into .grad for hooks before the step of"
                f" {kind}, which costs one more all-gather in every step. If .grad is not needed"
                " there, pass gradients_in_hooks=False to the strategy."
            )
        if self.are_behind or (self.are_in_front and not shows):
            said.append(
                f"Hooks of the step of {kind} find no gradient in .grad under strategy='dear'. Move"
                " code that reads .grad to on_before_optimizer_step, or before the step into `with"
                " strategy.whole_gradients():`. If no hook reads it, pass gradients_in_hooks=False"
                " to the strategy."
            )
        for text in said:
            if text not in self._told:
                self._told.add(text)
                warnings.warn(text, stacklevel=3)

    def remove(self) -> None:
        """Removes the hooks. Idempotent."""
        for handle in self._handles:
            handle.remove()


def before_every_step(method: Callable[[Optimizer], None]) -> RemovableHandle:
    """Calls a bound method before each step of any optimizer in this process.

    Calls end when the returned handle's `remove` is called, or when the method's object is freed.
    """
    # A weak reference, since torch keeps a hook and what it refers to until the hook is removed.
    return all_optimizers.register_optimizer_step_pre_hook(partial(_call, WeakMethod(method)))


def _unless_nested(hook: Any, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    return None if is_nested(optimizer) else hook(optimizer, args, kwargs)


def _behind_closure(begin: Callable[[], None], optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Pre-hook of `step` that calls `begin` after the closure, or at once without a closure.

    Returns:
        Arguments of `step` with another closure, which calls the user's closure and then `begin`.
        It raises if it is called twice. None means that the arguments stay as they are.
    """
    this, *rest = args
    closure = rest[0] if rest else kwargs.get("closure")
    if closure is None:
        begin()
        return None

    def closure_then_step() -> Any:
        nonlocal closure
        call, closure = closure, None
        if call is None:
            raise RuntimeError(
                f"{type(optimizer).__name__} calls its closure more than once in a step. Use"
                " strategy='ddp', since strategy='dear' can reduce gradients only once in a step."
            )
        loss = call()
        begin()
        return loss

    if rest:
        return (this, closure_then_step, *rest[1:]), kwargs
    return args, {**kwargs, "closure": closure_then_step}


def _call(method: Any, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if (on_step := method()) is not None:
        on_step(optimizer)


def warn_of_leftovers(optimizer: Optimizer) -> None:
    """Warns that `zero_grad` was not called since the last step.

    Plain torch would add new gradients to those of the last step, which are gone here.
    """
    warnings.warn(
        f"{type(optimizer).__name__}.zero_grad() was not called since its last step. Call it after"
        " each step, also if gradients are cleared in another way. To add up gradients of several"
        " backwards, accumulate before the step. Under strategy='dear' a step forgets the gradients"
        " that it has used, and later ones are not added to them.",
        stacklevel=2,
    )
