"""A call of `optimizer.step` whose updates are made later, a few parameters at a time."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_dear.optimizers.elementwise import inner_step


class DeferredStep:
    """What the optimizer was set to when `step` was called: learning rates, and all else.

    Each part of the step is made by a twin: an object of the optimizer's class with the same
    attributes and the same `state`, and with copies of the groups. So the step sees no option that
    was changed since, and what it counts in the groups or in itself is forgotten with the twin: the
    optimizer's own, empty step has counted it once. What it counts in a container of its own is
    shared, and counted by every part: `check_tensorwise` refuses it if steps depend on that.

    Args:
        optimizer: The user's; its `state` is mutated by `run`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        # Without the old state, which would else outlive a load_state_dict.
        outdated = ("state", "param_groups")
        self._attributes = {k: v for k, v in optimizer.__dict__.items() if k not in outdated}
        self._options = [_copied(group) for group in optimizer.param_groups]

    def run(self, parameters: Sequence[Sequence[Tensor]]) -> None:
        """Steps these parameters, by group, with what is in their `.grad`."""
        twin: Any = object.__new__(type(self._optimizer))
        twin.__dict__.update(self._attributes)
        twin.__dict__.update(
            state=self._optimizer.state,
            param_groups=[
                {**_copied(options), "params": list(own)}
                for options, own in zip(self._options, parameters, strict=True)
            ],
        )
        inner_step(twin)(twin)


def _copied(group: dict[str, Any]) -> dict[str, Any]:
    return {key: _copy_of(value) for key, value in group.items() if key != "params"}


def _copy_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return deepcopy(value) if isinstance(value, list | dict | set) else value
