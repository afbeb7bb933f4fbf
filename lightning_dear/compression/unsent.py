"""What a rank has not sent, or has sent in vain, where anyone of a bucket's numbers may travel."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.compression.memory import Memory


class Unsent(Memory):
    """acc = g + residual; what is sent is taken out of it, and put back if it was not selected.

    That is known only when the step has been made, so `put_back` may come after `commit`.
    """

    names: ClassVar[tuple[str, ...]] = ("residual",)

    def accumulate(self, gradients: Tensor, scale: Tensor | None) -> Tensor:
        """Adds up what may be sent.

        Args:
            gradients: Flat fp32; not mutated.
            scale: What they are multiplied by; None: 1.

        Returns:
            acc, flat, without the scale: what is pending, to be mutated where something is sent.
        """
        unscaled = gradients if scale is None else gradients / scale
        waiting = self._next("residual", unscaled)
        torch.add(self._latest("residual", unscaled), unscaled, out=waiting)
        self._has_pending = True
        return waiting

    def put_back(self, places: Tensor, numbers: Tensor) -> None:
        """Adds `numbers`, which were sent from `places` (all distinct), to what is to be sent."""
        latest = (self._pending if self._has_pending else self._kept)["residual"]
        latest.index_add_(0, places, numbers)


class Forgotten(Unsent):
    """The same without feedback: nothing is kept."""

    names: ClassVar[tuple[str, ...]] = ()

    @override
    def accumulate(self, gradients: Tensor, scale: Tensor | None) -> Tensor:
        return gradients.clone() if scale is None else gradients / scale

    @override
    def put_back(self, places: Tensor, numbers: Tensor) -> None:
        return None
