"""Checks that all ranks step with the same learning rates and other options of their optimizers.

An option is an entry of a parameter group: a learning rate, Adam's betas, weight decay.
"""

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
"""(number of a parameter group, name of an option) -> value of the option, as `options_of` has it:
tensors as numbers, so that values can be compared, pickled and hashed by their `repr`."""

_KINDS = (bool, int, float, str, tuple, type(None), Tensor)


def options_of(optimizer: Optimizer) -> OptionValues:
    """Options in the parameter groups, to be compared between ranks. Local, does not block.

    Tensors of one element on the CPU count as their value. Other tensors count as None, so that
    they are not compared: the host would have to wait for values on a device. Options of other
    types than `_KINDS`, such as the list of parameters, are left out.
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
        # The value is copied: a scheduler may later write to this tensor.
        return value.tolist() if value.is_cpu and value.numel() == 1 else None
    return value


def check_options(what: str, reports: Sequence[OptionValues]) -> None:
    """Refuses options that differ between ranks. Local.

    Args:
        what: For the message, where it stands after "Ranks ": what ranks do with which optimizer.
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
    """Compares learning rates and other options between ranks in each round of gradients.

    It is a `bucket_round.Note`, whose bytes travel with the round's flags: a hash of the
    optimizer's options, and the complement of each byte of the hash. Ranks get the maximum over
    ranks of each byte. If all ranks have sent the same hash, a byte and its complement still add up
    to 255. If not, some of these sums are larger.

    Args:
        training: What all optimizers of the module share.
        optimizer: The optimizer whose parameter groups are compared.
        number: Optimizer number, for messages.
    """

    NUM_BYTES = 8

    def __init__(self, training: Training, optimizer: Optimizer, number: int) -> None:
        self._training, self._optimizer, self._number = training, optimizer, number
        # Options that `say` has hashed in the present round, and in the round before.
        self._options: OptionValues = {}
        self._before: OptionValues = {}
        # Names and values of all options at the last call of `_have_changed`.
        self._seen: Sequence[Any] = ()
        # The hash of `_options` and its complement. None before the first round.
        self._digest: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the note. 0 if there is no other rank."""
        return self.NUM_BYTES if self._training.world.size > 1 else 0

    def say(self, device: torch.device) -> Tensor:
        """Returns a hash of the options and its complement: [num_bytes] uint8 on `device`.

        To be called once in each round, since it also stores the options of the round before.
        """
        self._before = self._options
        if self._digest is None or self._have_changed():
            self._options = options_of(self._optimizer)
            hashed = crc32(repr(self._options).encode()).to_bytes(self.NUM_BYTES // 2, "little")
            both = int.from_bytes([*hashed, *(255 - own for own in hashed)], "little", signed=True)
            # All bytes are written as one integer, since `torch.full` does not block the host. To
            # copy bytes to a device would.
            self._digest = torch.full((1,), both, device=device).view(torch.uint8)
        return self._digest

    def _have_changed(self) -> bool:
        """Whether the options have changed since `say` has hashed them.

        It is fast if all values are the same objects as at the last call. It compares by value
        (`options_of`) if an object was replaced, or if any option is a tensor or a tuple, such as
        Adam's betas: a tensor, also one in a tuple, may have been written to.
        """
        groups = self._optimizer.param_groups
        keys = chain.from_iterable(groups)
        values = chain.from_iterable(group.values() for group in groups)
        before, self._seen = self._seen, [*keys, *values]
        is_same = len(before) == len(self._seen) and all(map(is_, before, self._seen))
        if is_same and not any(isinstance(one, Tensor | tuple) for one in self._seen):
            return False
        return options_of(self._optimizer) != self._options

    def hear(self, maxima: Sequence[int], *, is_of_round_before: bool = False) -> None:
        """Compares the options of all ranks one by one, if their hashes differ; see `Note`.

        Then it is collective and blocks. It does nothing if all ranks have sent the same hash.

        Args:
            maxima: Maximum over ranks of each byte.
            is_of_round_before: Whether the maxima, and so the options to compare, are those of the
                round before (NCCL).

        Raises:
            ValueError: On all ranks, if options differ; names the option.
        """
        # On NCCL all maxima are 0 in the first round. At world size 1 there are none.
        if not any(maxima) or sum(maxima) == 255 * len(maxima) // 2:
            return
        what = f"step with different options: {type(self._optimizer).__name__} {self._number}"
        options = self._before if is_of_round_before else self._options
        check_options(what, self._training.collectives.all_gather_object(options))
