"""What a rank has sent of a bucket, until it is known what of it has arrived."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lightning_dear.compression.selectors import true_places
from lightning_dear.compression.unsent import Unsent
from lightning_dear.exchange.sparse.entries import Entries, is_among


@dataclass
class Sent:
    """What a rank has sent of a bucket, round by round.

    Attributes:
        standing: What the residual still holds, and is erased there where it has arrived.
        cleared: What is erased there already, and is added back where it has not arrived.
    """

    standing: list[Entries] = field(default_factory=list)
    cleared: list[Entries] = field(default_factory=list)

    def clear(self, worker: Unsent) -> None:
        """Another round of the same step must not send again what an earlier one has sent."""
        for one in self.standing:
            worker.clear(one.places)
        self.cleared += self.standing
        self.standing = []

    def leave_out(self, parts: Sequence[slice]) -> None:
        """As if zeros had been sent of `parts`, whose parameters nobody has used."""
        for one in (*self.standing, *self.cleared):
            for part in parts:
                is_unused = (one.places >= part.start) & (one.places < part.stop)
                one.numbers.masked_fill_(is_unused, 0.0)

    def settle(self, worker: Unsent, has_arrived: Callable[[Entries], Tensor]) -> None:
        """What was sent and has arrived is not to be sent any more, and the rest is to be.

        Args:
            worker: What holds it; mutated.
            has_arrived: Numbers that were sent -> which of them have; zeros were not sent.
        """
        for one in self.standing:
            arrived = has_arrived(one)
            worker.note_arrived(one.places, arrived)
            worker.clear(one.places.index_select(0, true_places(arrived)))
        for one in self.cleared:
            arrived = has_arrived(one)
            worker.note_arrived(one.places, arrived)
            worker.put_back(one.places, one.numbers.masked_fill(arrived, 0.0))

    def settle_all(self, worker: Unsent) -> None:
        """The same where all that was sent has arrived."""
        for one in self.standing:
            was_sent = true_places(one.numbers != 0)
            worker.clear(one.places.index_select(0, was_sent))


def is_selected(sent: Entries, selected: Tensor, end: int) -> Tensor:
    """Which of the numbers that were sent are among [n] int64 places, up to `end`."""
    # A static message is filled up with zeros from place 0, whatever comes of that place.
    return is_among(sent.places, selected, end) & (sent.numbers != 0)
