"""How far Ok-Topk's sum is from the k largest of all that ranks have: xi of its assumption 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dear.collectives.work import SELECTION_NUMBERS, Collectives, uncounted
from lightning_dear.exchange.owned_bucket import OwnedBucket


@dataclass(frozen=True)
class Seen:
    """What a rank had of a bucket before it selected.

    Attributes:
        waiting: acc, without a loss scale.
        gradients: g / P, likewise.
    """

    waiting: Tensor
    gradients: Tensor


def measure(
    seen: Sequence[tuple[OwnedBucket, Seen]],
    collectives: Collectives,
    first_number: int,
    scale: Tensor | None,
) -> None:
    """Writes |topk(sum of acc) - u|^2 and |sum of g / P|^2 into the tallies of these buckets.

    All ranks call, once owners have chosen; blocks. Sends three times as much as a dense step.
    """
    number = SELECTION_NUMBERS + first_number
    with uncounted(collectives):
        for one, own in seen:
            u = one.bucket.mean.float()
            u = u.clone() if scale is None else u / scale
            for numbers in (own.waiting, own.gradients, u):
                collectives.launch_all_reduce(numbers, number).wait()
            off, places = u, own.waiting.abs().topk(one.k, sorted=False).indices
            off[places] -= own.waiting[places]
            squares = (torch.linalg.vector_norm(each) ** 2 for each in (off, own.gradients))
            one.tally.off_squared, one.tally.gradient_squared = map(float, squares)
