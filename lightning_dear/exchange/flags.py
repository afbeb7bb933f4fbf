"""What ranks tell each other of a round of gradients: bytes, of which each hears the largest."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_dear.collectives.work import Collectives
from lightning_dear.exchange.dense import DenseExchange

UNUSED, USED, LATE = 0, 1, 2
"""What a rank says of a parameter, in a byte: it got no gradient, a gradient, or another one after
its bucket had been launched."""


class RoundFlags:
    """Starts telling the other ranks what this one says.

    Args:
        says: Per parameter one of the three.
        voting: Which of them are voted on: of these all ranks hear whether one has no gradient.
        exchange: Has found nan or inf on this rank, or not, and is told whether any has.
        collectives: What moves the bytes, rank 0's signal among them.
        device: Where the bytes are.
    """

    def __init__(
        self,
        says: list[int],
        voting: Sequence[int],
        exchange: DenseExchange,
        collectives: Collectives,
        device: torch.device,
    ) -> None:
        self._says, self._voting = says, voting
        self._exchange, self._collectives = exchange, collectives
        self._uses_all = all(one == USED for one in says)
        self._flags = torch.ones(len(says) + len(voting) + 2, dtype=torch.uint8, device=device)
        if not self._uses_all or voting:
            lacks = [says[number] == UNUSED for number in voting]
            self._flags[:-2] = torch.tensor([*says, *lacks], dtype=torch.uint8)
        self._flags[-2] = exchange.take_found_inf()
        self._flags[-1] = collectives.rank == 0 and collectives.signal.ask()
        self.work = collectives.launch_any(self._flags)

    def hear(self) -> tuple[list[int], list[int]]:
        """To be called when `work` has ended. Where flags are on a device and are read, it blocks.

        Returns:
            The most that any rank says per parameter, and the numbers of those that are voted on
            and that some ranks have a gradient for, but not all.
        """
        self._exchange.hear_found_inf(self._flags[-2])
        # Where reading flags blocks the host, late gradients were refused, and a rank that used
        # everything learns nothing new from them.
        if self._uses_all and not self._collectives.reads_flags_freely and not self._voting:
            return self._says, []
        *told, _, heard = self._flags.tolist()
        self._collectives.signal.heard = heard > 0
        said, lacks = told[: len(self._says)], told[len(self._says) :]
        split = [
            number
            for number, lacked in zip(self._voting, lacks, strict=True)
            if lacked and said[number] != UNUSED
        ]
        return said, split
