"""The end of an epoch, which ranks with unequal numbers of batches reach together: `SharedEnd`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(eq=False)
class SharedEnd:
    """What ranks know of the end of an epoch, which all of them reach after the same batch.

    An epoch has as many batches as the rank with the most of them. If loaders do not know that
    number, each rank fetches some batches ahead and tells how many it has got.

    Attributes:
        is_asked: Whether rounds carry that number (`BatchesAhead`); to be set before a round.
        epoch: Number of the epoch, counted from 1. 0 means that none has begun.
        given: Number of batches of this epoch that training has taken, equal on all ranks; to be
            assigned to.
        ahead: Number of batches that this rank has fetched beyond these; to be assigned to.
        lookahead: Number of batches that a rank has ahead, unless it has no more; to be assigned
            to. 1 is enough on gloo; on NCCL rounds are heard one step later, so 2 are needed.
        known: Number of this epoch's batches that some rank is known to have, equal on all ranks.
        is_final: Whether the epoch ends after `known` batches. If not, there may be more.
    """

    is_asked: bool = False
    epoch: int = 0
    given: int = 0
    ahead: int = 0
    lookahead: int = 1
    known: int = 0
    is_final: bool = False

    def begin(self, length: int | None) -> None:
        """Begins an epoch of `length` batches. None means that the number is not known. Local."""
        self.epoch, self.given, self.ahead = self.epoch + 1, 0, 0
        self.known, self.is_final = length or 0, length is not None

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, given): what `ahead` is counted from."""
        return self.epoch, self.given

    def hear(self, position: tuple[int, int], ahead: int) -> None:
        """Receives the largest `ahead` of all ranks. Local.

        Args:
            position: `position` when ranks told it. Nothing happens if that was in another epoch.
            ahead: The maximum over ranks, equal on all ranks.
        """
        epoch, given = position
        if epoch == self.epoch and not self.is_final:
            self.known = max(self.known, given + ahead)
            self.is_final = ahead < self.lookahead


class BatchesAhead:
    """Note (`engine/notes.py`) of one byte: how many batches a rank has ahead, see `SharedEnd`.

    Each optimizer has its own, since on NCCL each hears its own round before.

    Args:
        end: Returns the end that is told and heard of.
    """

    def __init__(self, end: Callable[[], SharedEnd]) -> None:
        self._end = end
        # Positions in this round and in the one before.
        self._present = self._before = (0, 0)

    @property
    def num_bytes(self) -> int:
        """1 if the end of loaders is asked for, otherwise 0."""
        return int(self._end().is_asked)

    def say(self) -> bytes:
        """Returns the number of batches that this rank has ahead, see `Note`."""
        self._before, self._present = self._present, self._end().position
        return bytes([self._end().ahead])

    def hear(self, maxima: Sequence[int], *, is_of_round_before: bool = False) -> None:
        """Tells the end what the rank with the most batches has ahead, see `Note`."""
        position = self._before if is_of_round_before else self._present
        # Empty if it was not asked for, or not yet in the round before.
        for ahead in maxima:
            self._end().hear(position, ahead)
