"""Checks that all ranks step with the same learning rates and other options of their optimizers."""

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
"""(number of a parameter group, name of an option) -> value."""

_KINDS = (bool, int, float, str, tuple, type(None), Tensor)


def options_of(optimizer: Optimizer) -> OptionValues:
    """Options in the parameter groups. Tensors of one element on the CPU count as their value.

    Other tensors count as None: the host would have to wait for values on a device.
    """
    return {
        (number, key): _as_plain(value)
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if isinstance(value, _KINDS)
    }


def _as_plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_as_plain, value))
    if isinstance(value, Tensor):
        # Its value now: a scheduler may later write to this tensor.
        return value.tolist() if value.is_cpu and value.numel() == 1 else None
    return value


def check_options(what: str, reports: Sequence[OptionValues]) -> None:
    """Refuses options that differ between ranks.

    Args:
        what: Completes the sentence "Ranks ...", for the message: what they do with which
            optimizer.
        reports: Options of every rank, by rank.

    Raises:
        ValueError: Naming the first option that differs from rank 0's.
    """
    for rank, other in enumerate(reports):
        for number, key in {**reports[0], **other}:
            left, right = (report.get((number, key)) for report in (reports[0], other))
            if left != right:
                raise ValueError(
                    f"Ranks {what}, parameter group {number}: {key} is {left} on rank 0 and {right}"
                    f" on rank {rank}. Set the same on all ranks, and let schedules follow a metric"
                    " that all share (sync_dist=True). Each rank steps a part of the model."
                )


class SharedOptions:
    """Compares learning rates and other options between ranks in each step.

    It is a `bucket_round.Note`, sent with each round: a hash of the optimizer's options, and the
    complement of each byte of the hash. If all ranks send the same, a byte and its complement add
    up to 255 after the maximum, too. If not, some sum is larger.

    Args:
        training: What all optimizers of the module share.
        optimizer: The optimizer whose parameter groups are compared.
        number: Optimizer number, for messages.
    """

    NUM_BYTES = 8

    def __init__(self, training: Training, optimizer: Optimizer, number: int) -> None:
        self._training, self._optimizer, self._number = training, optimizer, number
        # Options of the present round, and of the round before.
        self._options: OptionValues = {}
        self._before: OptionValues = {}
        self._seen: Sequence[Any] = ()
        self._digest: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the note. 0 if there is no other rank."""
        return self.NUM_BYTES if self._training.world.size > 1 else 0

    def say(self, device: torch.device) -> Tensor:
        """Returns a hash of the options and its complement: [num_bytes] uint8 on `device`."""
        self._before = self._options
        if self._digest is None or self._have_changed():
            self._options = options_of(self._optimizer)
            hashed = crc32(repr(self._options).encode()).to_bytes(self.NUM_BYTES // 2, "little")
            both = int.from_bytes([*hashed, *(255 - own for own in hashed)], "little", signed=True)
            # As one number, which `torch.full` writes on a device without blocking the host.
            self._digest = torch.full((1,), both, device=device).view(torch.uint8)
        return self._digest

    def _have_changed(self) -> bool:
        """Whether options have changed since the last call. Fast if all are the same objects.

        Tensors may have been written to. If there are any, all options are compared by value.
        """
        groups = self._optimizer.param_groups
        keys = chain.from_iterable(groups)
        values = chain.from_iterable(group.values() for group in groups)
        before, self._seen = self._seen, [*keys, *values]
        is_same = len(before) == len(self._seen) and all(map(is_, before, self._seen))
        if is_same and not any(isinstance(one, Tensor | tuple) for one in self._seen):
            return False
        return options_of(self._optimizer) != self._options

    def hear(self, maxima: Sequence[int], *, is_late: bool = False) -> None:
        """Compares the options of all ranks one by one, if their hashes differ; see `Note`.

        Raises:
            ValueError: On all ranks, if options differ; names the option.
        """
        # All maxima are 0 if nothing was heard yet.
        if not any(maxima) or sum(maxima) == 255 * len(maxima) // 2:
            return
        what = f"step with different options: {type(self._optimizer).__name__} {self._number}"
        options = self._before if is_late else self._options
        check_options(what, self._training.collectives.all_gather_object(options))
