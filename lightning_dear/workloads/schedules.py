"""Learning-rate schedules over the number of steps of the whole run."""

import math
from collections.abc import Callable

from torch.optim import Optimizer, lr_scheduler

OptimizerFactory = Callable[..., Optimizer]
"""Called as ``factory(parameters)``."""

SchedulerFactory = Callable[..., lr_scheduler.LRScheduler]
"""Called as ``factory(optimizer, total_steps=...)``; Lightning steps the scheduler after each
optimizer step."""


def warmup_cosine(
    optimizer: Optimizer,
    total_steps: int,
    warmup_fraction: float = 0.1,
    final_fraction: float = 0.05,
) -> lr_scheduler.LambdaLR:
    """Raise the learning rate linearly, then lower it along half a cosine.

    Args:
        optimizer: Optimizer whose learning rate is changed.
        total_steps: Number of optimizer steps in the whole run.
        warmup_fraction: Share of ``total_steps`` in which the rate rises; at least 0, below 1.
        final_fraction: Learning rate at the end, as a share of the optimizer's own.

    Raises:
        ValueError: If ``total_steps`` or one of the fractions is out of range.
    """
    if total_steps < 1:
        raise ValueError(
            f"total_steps={total_steps} is less than 1. Set trainer.max_steps or"
            " trainer.max_epochs. A run without an end has no cosine to follow."
        )
    if not 0.0 <= warmup_fraction < 1.0:
        raise ValueError(f"warmup_fraction={warmup_fraction} is not valid. Choose 0 up to below 1.")
    if not 0.0 <= final_fraction <= 1.0:
        raise ValueError(f"final_fraction={final_fraction} is not valid. Choose 0 to 1.")
    warmup_steps = max(1, round(total_steps * warmup_fraction))

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return final_fraction + (1.0 - final_fraction) * cosine

    return lr_scheduler.LambdaLR(optimizer, factor)
