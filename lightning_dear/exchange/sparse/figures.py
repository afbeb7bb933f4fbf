"""How many numbers of a sparse bucket were wanted, selected, sent and kept in its last step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass
class Tally:
    """Of one bucket; what comes back counts once it has arrived.

    Counts may be tensors, where the host does not wait for them.

    Attributes:
        num_wanted: k.
        num_selected: What reached this rank's threshold.
        num_sent: What of that no cap of messages has held back.
        num_kept: What all owners have kept of the sums; 0 where nothing is selected once more.
        most_kept: Of one owner.
        words_sent: Values and places, of 4 bytes, that left this rank.
        words_received: Those that came.
        most_words: What either is at most.
    """

    num_wanted: int = 0
    num_selected: int | Tensor = 0
    num_sent: int | Tensor = 0
    num_kept: int | Tensor = 0
    most_kept: int | Tensor = 0
    words_sent: int = 0
    words_received: int = 0
    most_words: float = 0.0


def figures_of(tallies: Sequence[Tally], world_size: int) -> dict[str, float]:
    """For whoever logs: sums over buckets, shares of sums, and the least balanced bucket.

    Waits for counts that are tensors on an accelerator.

    "num_wanted", "num_selected", "num_kept": see `Tally`. "held_back": share of the selected that
    caps of messages have kept in the residual. "imbalance": what the owner of most has kept, over
    the mean. "share_of_bound": words sent or received, the more of them, over
    `SparseAllReduce.most_words`.
    """
    selected = sum(int(one.num_selected) for one in tallies)
    sent = sum(int(one.num_sent) for one in tallies)
    # The bound is one of either direction, so that the busier one is held against it.
    words = max(sum(one.words_sent for one in tallies), sum(one.words_received for one in tallies))
    counts = [(int(one.most_kept), int(one.num_kept)) for one in tallies]
    # Baselines keep nothing in particular: what they send has arrived.
    kept = [(most, count) for most, count in counts if count]
    figures = {
        "num_wanted": float(sum(one.num_wanted for one in tallies)),
        "num_selected": float(selected),
        "held_back": 1 - sent / selected if selected else 0.0,
        "share_of_bound": words / (sum(one.most_words for one in tallies) or 1.0),
    }
    if kept:
        figures["num_kept"] = float(sum(count for _, count in kept))
        figures["imbalance"] = max(most * world_size / count for most, count in kept)
    return figures
