"""Looks at every read of every forward, where the gates and waits trust what they recorded."""

from __future__ import annotations

from typing import Any

from lightning_dear.engine.active_plan import ActivePlan
from lightning_dear.engine.read_order import ReadMode
from lightning_dear.engine.trained_parameters import TrainedParameters


def audit(trained: TrainedParameters, active: ActivePlan) -> ReadMode:
    """A context in which reading a parameter that is still being gathered raises.

    Sees reads through references that no gate sees, also under `no_grad` and through `.data`,
    where the step's own guard (see `GradientReducer.check_was_complete`) sees only those that take
    part in backward. Slow: runs in front of every torch function.

    Raises:
        RuntimeError: At the read, naming the parameter.
    """
    index_of = {id(parameter): index for index, parameter in enumerate(trained.parameters)}

    def check(value: Any) -> None:
        index = index_of.get(id(value))
        if index is None:
            return
        buckets = active.flat.placements[index].buckets
        if any(active.gatherer.is_pending(number) for number in buckets):
            raise RuntimeError(
                f"'{trained.names[index]}' was read while its new value was still being gathered,"
                " through a reference that strategy='dear' cannot see. Read it as an attribute of"
                " its module, or call strategy.complete_parameters() before reading it."
            )

    return ReadMode(check)
