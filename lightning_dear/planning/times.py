"""When one step reads what and has its gradients, as if nothing had to be communicated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelTimes:
    """One step's compute, in seconds, without communication.

    Attributes:
        forward_s: From the beginning of the forward to its end.
        backward_s: From the beginning of the backward to its end.
        first_use_s: Tensor index -> its first read, since the forward began.
        ready_s: Tensor index -> its gradient, since the backward began.
    """

    forward_s: float
    backward_s: float
    first_use_s: Mapping[int, float]
    ready_s: Mapping[int, float]
