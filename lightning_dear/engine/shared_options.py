"""Learning rates and the like: each rank steps a part of the model, and all with the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dear.engine.training import Training

OptionValues = Mapping[tuple[int, str], Any]
"""(number of a parameter group, key) -> value."""

_KINDS = (bool, int, float, str, tuple, type(None), Tensor)


def options_of(optimizer: Optimizer) -> OptionValues:
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


def check_options(what: str, reports: Sequence[OptionValues]) -> None:
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

    A note in each round (`bucket_round.Note`): a hash of the optimizer's options, and its
    complement. If all ranks say the same, byte and complement add up to 255 in the maximum, too.

    Args:
        training: What the optimizer is a part of.
        optimizer: Its groups are looked at.
        number: Of the optimizer, for messages.
    """

    NUM_BYTES = 8

    def __init__(self, training: Training, optimizer: Optimizer, number: int) -> None:
        self._training, self._optimizer, self._number = training, optimizer, number
        # Of this step, and of the one before.
        self._options: OptionValues = {}
        self._before: OptionValues = {}
        self._seen: Sequence[Any] = ()
        self._digest: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the note; none if there is no other rank."""
        return self.NUM_BYTES if self._training.world.size > 1 else 0

    def say(self, device: torch.device) -> Tensor:
        """A hash of the present options, and its complement: [num_bytes] uint8 on `device`."""
        self._before = self._options
        if self._digest is None or self._have_changed():
            self._options = options_of(self._optimizer)
            hashed = crc32(repr(self._options).encode()).to_bytes(self.NUM_BYTES // 2, "little")
            both = int.from_bytes([*hashed, *(255 - one for one in hashed)], "little", signed=True)
            # As one number, which a device can be given without a wait.
            self._digest = torch.full((1,), both, device=device).view(torch.uint8)
        return self._digest

    def _have_changed(self) -> bool:
        """Whether options are others than at the last look. Cheap where all are the same objects.

        Tensors may have been written to, so that with one all options are looked at.
        """
        groups = self._optimizer.param_groups
        keys = chain.from_iterable(groups)
        values = chain.from_iterable(group.values() for group in groups)
        before, self._seen = self._seen, [*keys, *values]
        is_same = len(before) == len(self._seen) and all(map(is_, before, self._seen))
        if is_same and not any(isinstance(one, Tensor | tuple) for one in self._seen):
            return False
        return options_of(self._optimizer) != self._options

    def hear(self, told: Sequence[int], *, is_late: bool = False) -> None:
        """Takes the maximum over ranks of the last digest; of the one before if `is_late`.

        Raises:
            ValueError: If ranks have other options, on all of them, naming the option.
        """
        # In the maximum of two different hashes, some byte and its complement are more than 255.
        if not any(told) or sum(told) == 255 * len(told) // 2:
            return
        what = f"step with other options: {type(self._optimizer).__name__} {self._number}"
        options = self._before if is_late else self._options
        check_options(what, self._training.collectives.all_gather_object(options))
