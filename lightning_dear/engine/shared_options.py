"""Learning rates and the like: each rank steps a part of the model, and all with the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dear.collectives.work import Collectives

Options = Mapping[tuple[int, str], Any]
"""(number of a parameter group, key) -> value."""

_KINDS = (bool, int, float, str, tuple, type(None), Tensor)


def options_of(optimizer: Optimizer) -> Options:
    """What is set in the parameter groups; single numbers in tensors, too, as they are now.

    Not those on a device, for which the host would have to wait.
    """
    return {
        (place, key): _as_plain(value)
        for place, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if isinstance(value, _KINDS)
    }


def _as_plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_as_plain, value))
    if isinstance(value, Tensor):
        # A number, since whoever keeps the tensor would not see it change.
        return value.tolist() if value.is_cpu and value.numel() == 1 else None
    return value


def check_options(what: str, reports: Sequence[Options]) -> None:
    """Refuses options that are others on some rank than on rank 0.

    Args:
        what: What ranks do, and with which optimizer, for the message.
        reports: Every rank's options.

    Raises:
        ValueError: Naming the first that differs.
    """
    for rank, other in enumerate(reports):
        for place, key in {**reports[0], **other}:
            left, right = (one.get((place, key)) for one in (reports[0], other))
            if left != right:
                raise ValueError(
                    f"Ranks {what}, parameter group {place}: {key} is {left} on rank 0 and {right}"
                    f" on rank {rank}. Each rank steps a part of the model: set the same on all,"
                    " and let schedules follow a metric that all share (sync_dist=True)."
                )


class SharedOptions:
    """Notices in each step whether all ranks step with the same learning rates and the like.

    Args:
        optimizer: Its groups are looked at.
        number: Of the optimizer, for messages.
        collectives: Over all ranks.

    Attributes:
        num_bytes: Of a digest; none of a single rank, who has nobody to tell it.
    """

    NUM_BYTES = 8
    """Of a digest, beside the flags that travel in any case."""

    def __init__(self, optimizer: Optimizer, number: int, collectives: Collectives) -> None:
        self._optimizer, self._number = optimizer, number
        self._collectives = collectives
        self.num_bytes = self.NUM_BYTES if collectives.world_size > 1 else 0
        # Of this step, and of the one before.
        self._options: Options = {}
        self._before: Options = {}
        self._digest: Tensor | None = None
        # Nobody has said anything.
        self._said: Callable[[], list[int]] = lambda: [0, 0]

    def digest(self, device: torch.device) -> Tensor:
        """A hash of the present options, and its complement: [num_bytes], uint8, on `device`."""
        options, self._before = options_of(self._optimizer), self._options
        if self._digest is None or options != self._options:
            self._options = options
            hashed = crc32(repr(options).encode()).to_bytes(self.NUM_BYTES // 2, "little")
            both = int.from_bytes([*hashed, *(255 - one for one in hashed)], "little", signed=True)
            # As one number, which a device can be given without a wait.
            self._digest = torch.full((1,), both, device=device).view(torch.uint8)
        return self._digest

    def said_before(self, flags: Tensor) -> list[int]:
        """What `flags` were at the call before, which is long past.

        At the first call nothing, as the last two of them say it.
        """
        said, self._said = self._said, self._collectives.streams.read_later(flags)
        return said()

    def hear(self, told: Sequence[int], *, is_late: bool = False) -> None:
        """Takes the maximum over ranks of the last digest; of the one before if `is_late`.

        Raises:
            ValueError: If ranks have other options, on all of them, naming the option.
        """
        # A byte and its complement are 255 together, and the maxima are more if any two differ.
        if sum(told) == 255 * len(told) // 2:
            return
        what = f"step with other options: {type(self._optimizer).__name__} {self._number}"
        options = self._before if is_late else self._options
        check_options(what, self._collectives.all_gather_object(options))
