"""What residuals are multiplied by where a schedule has changed the learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class RateFollower:
    """Remembers the learning rates for which residuals, which are of gradients, are right.

    Args:
        optimizer: Its parameter groups are read.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._rates: dict[int, float] = {}

    def start_anew(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Residuals are right for the learning rates of `saved`, the parameter groups of a state.

        Where these are 0 or missing, for whatever is read next.
        """
        rates = (float(group.get("lr", 0.0)) for group in saved)
        self._rates = {number: rate for number, rate in enumerate(rates) if rate}

    def changes(self) -> dict[Tensor, float]:
        """Parameter -> its last learning rate over its present one, where these differ.

        Waits for the device where learning rates are tensors there.

        From now on residuals count as right for the present ones; but for rates of 0, with which
        nothing that is sent has an effect.
        """
        factors: dict[Tensor, float] = {}
        for number, group in enumerate(self._optimizer.param_groups):
            rate = float(group.get("lr", 0.0))
            if not rate:
                continue
            factor = self._rates.setdefault(number, rate) / rate
            self._rates[number] = rate
            if factor != 1:
                factors.update(dict.fromkeys(group["params"], factor))
        return factors
