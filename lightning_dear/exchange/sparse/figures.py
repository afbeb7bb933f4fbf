"""Figures of the last sparse step: how many entries were wanted, selected, sent and kept."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass
class Tally:
    """Counts of one bucket in one sparse step; of its last round, if the step has several.

    What is gathered is counted once it has arrived. A count may be a tensor on an accelerator,
    which `int` makes the host wait for.

    Attributes:
        num_wanted: Number of entries that the compressor asks for, k.
        num_selected: Number of entries that this rank's compressor has found, before caps.
        num_sent: Number of these that were sent. The others exceeded the size of a message.
        num_kept: Number of sums that all owners together have sent with their places. 0 if there
            are no owners, or if all elements were gathered.
        most_kept: Number of sums sent by the owner that sent most.
        words_sent: Number of 4-byte words (values and places) that this rank has sent.
        words_received: Number of 4-byte words that this rank has received.
        most_words: Upper bound of `words_sent`, and of `words_received`, if the step has one round.
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
    """Returns the figures of all buckets together, for logging. Local.

    Blocks until counts that are tensors on an accelerator are known.

    Args:
        tallies: Tallies of this rank's buckets that have had a sparse step.
        world_size: Number of ranks.

    Returns:
        Name -> figure. "num_wanted", "num_selected" and "num_kept" are the sums of these counts in
        `Tally`. "held_back" is the share of the entries found that exceeded messages and stayed in
        the residual. "imbalance" is the largest number of sums that one owner has kept, divided by
        the mean over owners, in the least balanced bucket. "share_of_bound" is the number of words
        sent or received, whichever is larger, divided by `SparseAllReduce.most_words`. "num_kept"
        and "imbalance" are left out if `Tally.num_kept` is 0 in all buckets.
    """
    selected = sum(int(tally.num_selected) for tally in tallies)
    sent = sum(int(tally.num_sent) for tally in tallies)
    # The bound holds for each direction, so that the busier one is compared with it.
    received = sum(tally.words_received for tally in tallies)
    words = max(sum(tally.words_sent for tally in tallies), received)
    counts = [(int(tally.most_kept), int(tally.num_kept)) for tally in tallies]
    # 0 with baselines that have no owners.
    kept = [(most, count) for most, count in counts if count]
    figures = {
        "num_wanted": float(sum(tally.num_wanted for tally in tallies)),
        "num_selected": float(selected),
        "held_back": 1 - sent / selected if selected else 0.0,
        "share_of_bound": words / (sum(tally.most_words for tally in tallies) or 1.0),
    }
    if kept:
        figures["num_kept"] = float(sum(count for _, count in kept))
        figures["imbalance"] = max(most * world_size / count for most, count in kept)
    return figures
