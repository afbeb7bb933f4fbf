"""The end of an epoch, which ranks with unequal numbers of batches reach together: `SharedEnd`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(eq=False)
class SharedEnd:
    """What ranks know of the end of one epoch, which all of them reach after the same batch.

    An epoch has as many batches as the rank with the most of them. If loaders do not know that
    number, each rank fetches some batches ahead and tells how many it has got.

    Attributes:
        known: Number of the epoch's batches that some rank is known to have, equal on all ranks.
        lookahead: Number of batches that a rank has ahead, unless it has no more. 0 means that the
            number is known from the beginning, so that nothing is told. 1 is enough on gloo; on
            NCCL rounds are heard one step later, so 2 are needed.
        is_final: Whether the epoch ends after `known` batches. If not, there may be more.
        given: Number of batches that training has taken, equal on all ranks; to be assigned to.
        ahead: Number of batches that this rank has fetched beyond these; to be assigned to.
    """

    known: int = 0
    lookahead: int = 0
    is_final: bool = False
    given: int = 0
    ahead: int = 0

    def hear(self, given: int, ahead: int) -> None:
        """Receives the largest `ahead` of all ranks. Local.

        Args:
            given: `given` when ranks told it.
            ahead: The maximum over ranks, equal on all ranks.
        """
        if not self.is_final:
            self.known, self.is_final = max(self.known, given + ahead), ahead < self.lookahead


class BatchesAhead:
    """Note (`engine/notes.py`) of one byte: how many batches a rank has ahead, see `SharedEnd`.

    Each optimizer has its own, since on NCCL each hears its own round before.

    Args:
        end: Returns the end of the present epoch.
    """

    def __init__(self, end: Callable[[], SharedEnd]) -> None:
        self._end = end
        # What was told of in this round and in the one before: the end, and its `given`.
        self._present = self._before = SharedEnd(), 0

    @property
    def num_bytes(self) -> int:
        """1 if the number of the epoch's batches was not known at its beginning, otherwise 0."""
        return int(self._end().lookahead > 0)

    def say(self) -> bytes:
        """Returns the number of batches that this rank has ahead, see `Note`."""
        end = self._end()
        self._before, self._present = self._present, (end, end.given)
        return bytes([end.ahead])

    def hear(self, maxima: Sequence[int], *, is_of_round_before: bool = False) -> None:
        """Tells the end what the rank with the most batches has ahead, see `Note`."""
        end, given = self._before if is_of_round_before else self._present
        # Empty if it was not told, or not yet in the round before.
        for ahead in maxima:
            end.hear(given, ahead)
