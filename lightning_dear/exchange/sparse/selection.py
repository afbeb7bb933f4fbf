"""How many numbers of a bucket are selected, sent and kept: where k is decided."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from lightning_dear.bucket import Bucket
from lightning_dear.collectives.work import Collectives
from lightning_dear.compression import Compressor, SparseAllReduce
from lightning_dear.compression.sparse_all_reduce import FEWEST_PER_RANK


@dataclass(frozen=True)
class Selection:
    """What follows from a codec and the size of a bucket, settled when the codec begins.

    Attributes:
        is_sparse: Whether a few numbers travel, rather than all; other counts are those there would
            be.
        k: How many numbers are wanted.
        most_selected: Most numbers that a rank selects.
        most_sent: Most numbers in one message.
        most_owned: Most numbers that one owner keeps; 0 where nobody owns a part.
        is_regional: Whether owners keep about k of the sums of regions that follow selections.
        most_words: Words, of 4 bytes, that a rank sends or receives at most.
        usual_words: Those that it usually sends.
    """

    is_sparse: bool
    k: int
    most_selected: int
    most_sent: int
    most_owned: int
    is_regional: bool
    most_words: float
    usual_words: float


def selection_of(codec: Compressor, numel: int, padded_numel: int, world_size: int) -> Selection:
    """Settles what `codec` sends of a bucket.

    Args:
        codec: One that selects, or another one, with which all numbers travel.
        numel: Elements of parameters in the bucket.
        padded_numel: All of its elements.
        world_size: Number of ranks.
    """
    # An all-reduce of two halves, the reduce-scatter and the all-gather, sends so much.
    dense_words = 2 * numel * (world_size - 1) / world_size
    if not isinstance(codec, SparseAllReduce):
        return Selection(False, 0, 0, 0, 0, False, dense_words, dense_words)
    # Also of what travels as it is: checkpoints say which k shares are of.
    is_sparse, k = codec.saves(numel, world_size), codec.entries(numel)
    most_owned = codec.most_owned(k, world_size)
    if most_owned is None:
        # All of a region, of which there are as many as ranks.
        most_owned = padded_numel // world_size if codec.is_scattered else 0
    return Selection(
        is_sparse,
        k,
        codec.most_selected(k),
        codec.most_sent(k, world_size),
        most_owned,
        codec.is_regional,
        codec.most_words(numel, world_size),
        codec.usual_words(numel, world_size) if is_sparse else dense_words,
    )


def check_buckets(
    codec: SparseAllReduce,
    uncompressed: Collection[int],
    collectives: Collectives,
    buckets: Sequence[Bucket],
) -> None:
    """Refuses buckets whose places do not fit, and warns (rank 0) if none is long enough.

    Raises:
        ValueError: If a bucket has more elements than places, of 32 bits, can number.
    """
    meant = [one for one in buckets if one.number not in uncompressed]
    longest = max((one.spec.padded_numel for one in meant), default=0)
    if longest > torch.iinfo(torch.int32).max:
        raise ValueError(
            f"compressor={codec.name!r} numbers elements with 32 bits, and a bucket has"
            f" {longest:,}. Fuse less: fusion='threshold' with a smaller bucket_cap_mb."
        )
    # Of a single rank nothing travels in any case.
    num_ranks = collectives.world_size
    is_sparse = any(codec.saves(one.spec.numel, num_ranks) for one in meant)
    if meant and num_ranks > 1 and not is_sparse and collectives.rank == 0:
        warnings.warn(
            f"compressor={codec.name!r} compresses nothing: no bucket has {FEWEST_PER_RANK} numbers"
            f" to send for each of {num_ranks} ranks (density={codec.density:g} of at most"
            f" {longest:,}). Raise density or bucket_cap_mb, or leave it out.",
            stacklevel=2,
        )
