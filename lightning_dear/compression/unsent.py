"""What a rank has not sent, or has sent in vain, where anyone of a bucket's numbers may travel."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.compression.error_feedback import Memory
from lightning_dear.compression.ok_topk import OkTopk
from lightning_dear.compression.sparse_all_reduce import SparseAllReduce


class Unsent(Memory):
    """acc = g + residual, of which what is sent is cleared where it has arrived.

    That is known only when the step has been made, so `clear` and `put_back` may come after
    `commit`. What may be added to meanwhile is cleared at once, and put back if it has not arrived.
    """

    names: ClassVar[tuple[str, ...]] = ("residual",)

    def accumulate(self, gradients: Tensor, scale: Tensor | None) -> Tensor:
        """Adds up what may be sent.

        Args:
            gradients: Flat fp32; not mutated.
            scale: What they are multiplied by; None: 1.

        Returns:
            acc, flat, without the scale: what is pending, which may be mutated.
        """
        unscaled = gradients if scale is None else gradients / scale
        waiting = self._next("residual", unscaled)
        torch.add(self._latest("residual", unscaled), unscaled, out=waiting)
        self._has_pending = True
        return waiting

    def flush(self, gradients: Tensor, scale: Tensor | None) -> None:
        """Adds all that is to be sent still to `gradients`, in place: it is sent with them.

        Args:
            gradients: Flat, of any precision.
            scale: As in `accumulate`.
        """
        left = self._latest("residual", gradients)
        gradients.add_(left if scale is None else left * scale)
        self._next("residual", gradients).zero_()
        self._has_pending = True

    def clear(self, places: Tensor) -> None:
        """Nothing is to be sent from [n] int64 `places` any more."""
        self._newest("residual").index_fill_(0, places, 0.0)

    def put_back(self, places: Tensor, numbers: Tensor) -> None:
        """Adds `numbers`, which were sent from `places`, to what is to be sent.

        Places are distinct but for those of zeros.
        """
        self._newest("residual").index_add_(0, places, numbers)

    def note_arrived(self, places: Tensor, has_arrived: Tensor) -> None:
        """Told of [n] places, from which something was sent, whether it has arrived.

        As `put_back`; places of which it has not may stand there several times.
        """

    def _newest(self, name: str) -> Tensor:
        return (self._pending if self._has_pending else self._kept)[name]


class UnsentVelocity(Unsent):
    """The same of momentum: u = m u + g, acc = u + residual, and u becomes 0 where it has arrived.

    Momentum correction and momentum factor masking, as in DGC (Lin et al. 2018, 3.2 and 3.3).

    Args:
        momentum: m, in [0, 1).
    """

    names: ClassVar[tuple[str, ...]] = ("momentum", "residual")

    def __init__(self, numel: int, device: torch.device, momentum: float) -> None:
        super().__init__(numel, device)
        self._momentum = momentum

    @override
    def accumulate(self, gradients: Tensor, scale: Tensor | None) -> Tensor:
        unscaled = gradients if scale is None else gradients / scale
        momentum = self._next("momentum", unscaled)
        if self._has_pending:
            # Gradients that come in several rounds of one step add up.
            momentum.add_(unscaled)
            return super().accumulate(unscaled, None)
        torch.add(unscaled, self._latest("momentum", unscaled), alpha=self._momentum, out=momentum)
        return super().accumulate(momentum, None)

    @override
    def flush(self, gradients: Tensor, scale: Tensor | None) -> None:
        waiting = self.accumulate(gradients.float(), scale)
        gradients.copy_(waiting if scale is None else waiting * scale)
        waiting.zero_()

    @override
    def note_arrived(self, places: Tensor, has_arrived: Tensor) -> None:
        momentum = self._newest("momentum")
        # Added, not written: where a place comes again as not arrived, that would undo the 0.
        momentum.index_add_(0, places, (-momentum[places]).masked_fill_(~has_arrived, 0.0))


class Forgotten(Unsent):
    """The same without feedback: nothing is kept."""

    names: ClassVar[tuple[str, ...]] = ()

    @override
    def accumulate(self, gradients: Tensor, scale: Tensor | None) -> Tensor:
        # New memory: who gets it may change it, and gradients must stay as they are.
        return gradients.clone() if scale is None else gradients / scale

    @override
    def flush(self, gradients: Tensor, scale: Tensor | None) -> None:
        return None

    @override
    def clear(self, places: Tensor) -> None:
        return None

    @override
    def put_back(self, places: Tensor, numbers: Tensor) -> None:
        return None


def new_unsent(codec: SparseAllReduce, numel: int, device: torch.device) -> Unsent:
    """What a rank keeps of a bucket of so many elements for `codec`."""
    if not codec.has_feedback:
        return Forgotten(numel, device)
    if isinstance(codec, OkTopk) and codec.momentum:
        return UnsentVelocity(numel, device, codec.momentum)
    return Unsent(numel, device)
