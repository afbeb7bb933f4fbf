"""Sparse all-reduces: each rank selects a few values of a bucket, which are summed over all ranks.

Not codecs, which encode rows to a fixed size: how many values travel to which rank depends on the
values. `exchange/sparse/` moves them.

In formulas P is the number of ranks, n the number of elements of a bucket, k the number of values
wanted, acc a rank's gradient / P + residual, and u the mean gradient that all ranks get. A place is
the index of a value in its bucket. A word is 4 bytes: a value or a place.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.compression import selectors
from lightning_dear.compression.codec import FewOfMany, Kind, Setting
from lightning_dear.compression.selectors import LocalThreshold

FEWEST_PER_RANK = 4
"""A bucket travels uncompressed if fewer values than this times the world size would be sent."""

NUDGE, MOST_NUDGES = 1.02, 20
NUDGED_BELOW, NUDGED_ABOVE = 3 / 4, 5 / 4
"""`Gaussiank` multiplies or divides a threshold by NUDGE, at most MOST_NUDGES times, while the
number of values above it is not between these shares of k."""

Found = tuple[Tensor, Tensor]
"""Places, [n] int64, and the values there, [n] fp32."""


@dataclass(frozen=True, kw_only=True)
class SparseAllReduce(FewOfMany):
    """Base of sparse all-reduces: each rank sends about k values of its gradient plus residual.

    How long a value waits in the residual is as in `TopK`. With a density of 1 buckets travel
    uncompressed.

    Args:
        density: Share of a bucket's elements that a rank selects, in (0, 1]. The default is 0.01,
            and k = max(1, ceil(density n)).
        error_feedback: See `Compressor`.
    """

    kind: ClassVar[Kind] = "contractive"
    is_tree: ClassVar[bool] = False
    """Whether sums go from rank to rank up a tree, and the result back down."""

    is_regional: ClassVar[bool] = False
    """Whether each owner keeps only the largest sums of its region, about k in all, and regions
    follow what ranks select. Otherwise regions are equal, and owners keep all sums."""

    @property
    def is_static(self) -> bool:
        """Tells whether messages always have the same length, so that no rank waits for lengths."""
        return False

    @override
    def check_with(self, setting: Setting) -> None:
        reason = "It sends the largest elements of the mean gradient, and no parameters."
        self._check_gathers_gradients(setting, reason)
        if not setting.decouple and not self.all_reduces:
            raise ValueError(
                f"decouple=False does not fit {self.name}. Leave out one of them: decouple=False"
                f" gathers nothing, and {self.name} gathers the sums that owners have selected."
            )

    def saves(self, numel: int, world_size: int) -> bool:
        """Tells whether a bucket of `numel` elements travels sparsely rather than uncompressed."""
        # With one rank nothing is sent. If all values are sent, their places would be for nothing.
        return world_size > 1 and FEWEST_PER_RANK * world_size <= self.entries(numel) < numel

    @abstractmethod
    def find(self, waiting: Tensor, k: int, threshold: LocalThreshold, step: int) -> Found:
        """Selects what a rank sends: returns places, ascending, and the values, without zeros.

        Args:
            waiting: [numel] fp32, gradient / P + residual; not mutated.
            k: Number of values wanted; about as many are returned.
            threshold: Threshold of the step before; mutated.
            step: Number of sparse steps before this one.
        """

    def caps(self, k: int, world_size: int) -> tuple[int, int, int | None]:
        """Returns how many values may be selected and sent; of more than that the largest are.

        Returns:
            Most values that a rank selects; most values in one message; most values that one owner
            keeps, where None means all values of its region.
        """
        return k, k, None

    def is_exact(self, step: int) -> bool:
        """Tells whether thresholds are computed anew in sparse step number `step`, from 0."""
        return True

    def are_regions_due(self, step: int) -> bool:
        """Tells whether new regions are made from the selections of sparse step number `step`."""
        return False

    def most_words(self, numel: int, world_size: int) -> float:
        """Returns the most words that a rank sends, or receives, in a step of one round.

        In this base class: if each rank sends its k values and places to all other ranks.

        Args:
            numel: Elements of the bucket.
            world_size: Number of ranks.
        """
        return 2 * self.entries(numel) * (world_size - 1)

    def usual_words(self, numel: int, world_size: int) -> float:
        """Returns the words of a usual step: exact thresholds and regions that fit."""
        return self.most_words(numel, world_size)


@dataclass(frozen=True, kw_only=True)
class ByThreshold(SparseAllReduce):
    """Base of sparse all-reduces that select with a `LocalThreshold`, which is kept between steps.

    Args:
        density: See `SparseAllReduce`.
        tau_prime: Number of steps from one exact threshold to the next, at least 1. The default is
            32.
        error_feedback: See `Compressor`.
    """

    tau_prime: int = 32

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("tau_prime")

    @override
    def is_exact(self, step: int) -> bool:
        return step % self.tau_prime == 0

    @override
    def find(self, waiting: Tensor, k: int, threshold: LocalThreshold, step: int) -> Found:
        return threshold.find(waiting, k, is_exact=self.is_exact(step))


@dataclass(frozen=True, kw_only=True)
class TopkA(ByThreshold):
    """Sends the k largest elements of acc to all other ranks, and each rank adds them up: u.

    What a rank has not sent stays in its residual: sum of acc = u + sum of residuals. This is the
    all-gather of sparse vectors of Renggli et al. 2019, "SparCML". It takes 2 k (P - 1) words,
    which grow with the number of ranks. All of it travels in backward, and nothing is gathered.

    Args:
        density: See `SparseAllReduce`.
        tau_prime: See `ByThreshold`.
        error_feedback: See `Compressor`.
    """

    name: ClassVar[str] = "topka"
    all_reduces: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Gaussiank(SparseAllReduce):
    """Does what `TopkA` does, with the threshold that acc would have if it were normal.

    A value is selected where |acc - mean| > s q, with s the standard deviation of acc and q the
    (1 - density / 2) quantile of the standard normal distribution (Shi et al. 2019, "Understanding
    Top-k Sparsification in Distributed Deep Learning"). As real tails differ, the threshold is
    corrected by 2 % at a time, at most 20 times, until between 3 k / 4 and 5 k / 4 values exceed
    it, as in the experiments of Ok-Topk's paper. If no value exceeds it, as when all are of one
    size, the k largest are selected, since they would otherwise wait for ever. At most k values are
    sent, the largest: sum of acc = u + sum of residuals. If 20 corrections leave only a few values,
    values wait several times as long as with `TopkA`.

    Args:
        density: See `SparseAllReduce`.
        error_feedback: See `Compressor`.
    """

    name: ClassVar[str] = "gaussiank"
    all_reduces: ClassVar[bool] = True

    @override
    def find(self, waiting: Tensor, k: int, threshold: LocalThreshold, step: int) -> Found:
        distances = torch.sub(waiting, waiting.mean()).abs_()
        deviation = torch.linalg.vector_norm(distances) / math.sqrt(max(1, len(waiting) - 1))
        floor = float(deviation) * NormalDist().inv_cdf(1 - self.density / 2)
        # `all_above` selects nan, too, so that a nan, or a mean of nan, is sent and found.
        places = selectors.all_above(distances, _nudged(distances, floor, k))
        if not len(places):
            places = selectors.largest(waiting, k)
        found = waiting.index_select(0, places)
        kept = selectors.true_places(found != 0)
        return places.index_select(0, kept), found.index_select(0, kept)


def _nudged(distances: Tensor, floor: float, k: int) -> float:
    """Returns `floor`, corrected until about k of `distances` exceed it."""
    for _ in range(MOST_NUDGES):
        count = np.count_nonzero(distances.numpy() > floor)
        if NUDGED_BELOW * k <= count <= NUDGED_ABOVE * k:
            break
        floor *= NUDGE if count > k else 1 / NUDGE
    return floor


@dataclass(frozen=True, kw_only=True)
class TopkDSA(ByThreshold):
    """Sends each rank's k largest elements of acc to owners of equal regions, which send all sums.

    What a rank has not sent stays in its residual: sum of acc = u + sum of residuals. This is the
    split all-gather with a dynamic switch of Renggli et al. 2019, "SparCML": the more ranks are
    summed, the fewer sums are 0. Once half of the bucket or more is not 0, sums travel without
    places. If values are spread evenly, it takes from 4 k (P - 1) / P words, where all ranks select
    the same places, to (2 k + n) (P - 1) / P words.

    Args:
        density: See `SparseAllReduce`.
        tau_prime: See `ByThreshold`.
        error_feedback: See `Compressor`.
    """

    name: ClassVar[str] = "topkdsa"
    is_scattered: ClassVar[bool] = True

    @override
    def most_words(self, numel: int, world_size: int) -> float:
        """Returns the words of a step in which no sum is 0."""
        return (2 * self.entries(numel) + numel) * (world_size - 1) / world_size

    @override
    def usual_words(self, numel: int, world_size: int) -> float:
        """Returns the words if each rank selects places at random."""
        k = self.entries(numel)
        some = 1 - (1 - k / numel) ** world_size
        return (2 * k + min(2 * some, 1) * numel) * (world_size - 1) / world_size


@dataclass(frozen=True, kw_only=True)
class GTopk(ByThreshold):
    """Adds the k largest elements of two ranks' acc, and passes the k largest sums on, up a tree.

    The k sums of the root go back down the tree: u (Shi et al. 2019, "A Distributed Synchronous SGD
    Algorithm with Global Top-k Sparsification"). What a rank does not pass on it adds to its
    residual, so that sum of acc = u + sum of residuals. There are ceil(log2 P) rounds up the tree
    and as many down, of 2 k words each. The rounds of all buckets come after backward.

    Args:
        density: See `SparseAllReduce`.
        tau_prime: See `ByThreshold`.
        error_feedback: See `Compressor`.
    """

    name: ClassVar[str] = "gtopk"
    is_tree: ClassVar[bool] = True
    all_reduces: ClassVar[bool] = True

    @override
    def most_words(self, numel: int, world_size: int) -> float:
        return 2 * self.entries(numel) * (world_size - 1).bit_length()


MODES = ("exact", "static")
"""Values of `OkTopk.mode`: messages as long as their content, or of a fixed length."""

NUM_FIRST_STEPS = 64
"""Number of first steps after each of which new regions are made, while residuals still grow."""


@dataclass(frozen=True, kw_only=True)
class OkTopk(ByThreshold):
    """Sums sparse values with near-optimal volume: reduce to owners of regions, then all-gather.

    After Li and Hoefler 2022, "Near-Optimal Sparse Allreduce for Distributed Deep Learning",
    algorithm 1. In backward each rank takes the values of acc = gradient / P + residual that reach
    its local threshold, about k, and sends each to the owner of the region in which it lies. Owners
    sum in rank order. Then they keep the largest sums, k in all, and send these to all ranks: u.
    Values that were sent and whose places are in u are cleared, and all others stay in the
    residual: sum of acc = u + sum of residuals. A rank sends, or receives, at most 6 k (P - 1) / P
    words in a step of one round, however many ranks there are.

    Local threshold: every `tau_prime` steps it is the k-th largest magnitude, exactly. In between
    it is used again, corrected by Hill's estimate of the tail. It is set anew if fewer than 2 k / 3
    or more than 4 k / 3 values reach it. Global threshold: in the first step, every `tau_prime`
    steps and after a change of density, owners find the k largest of all sums by histograms. In
    between each owner keeps the largest of its sums, as many as its share of k: its share, in the
    last step, of all sums that reached the last global threshold. Shares travel with the messages
    of that step, so that no rank waits for them. (In the paper owners keep what reaches the
    threshold, be it more or fewer than k.)

    Regions are cut so that about as many selected values lie in each. New ones are made from the
    selections of the step before, so that no backward waits for other ranks, every `tau` steps and
    after each of the first 64. If they do not fit, caps keep the bound above: the largest values of
    a message are sent, of equal ones the first, and all others stay in the residual.

    Mode "static" is for NCCL: messages are always as long as the caps allow, so that no host waits
    for lengths. There are no thresholds: each rank takes its k largest values, of equal ones any,
    and each owner keeps its k / P largest sums. If regions do not fit, fewer than k sums are sent,
    and the rest stays in the residuals. Each step takes at most 2 (message_cap + 1) k (P - 1) / P
    words, which is 5 k (P - 1) / P with the default cap.

    Args:
        density: See `SparseAllReduce`.
        mode: "exact" (the default) sends messages as long as their content, with gloo only.
            "static" sends messages of a fixed length.
        tau: Number of steps from new regions to the next, at least 1. The default is 64.
        tau_prime: Number of steps from exact thresholds to the next, at least 1. The default is 32.
            Not with mode="static".
        message_cap: Most values of one rank in one region, in units of k / P, at least 1. The
            default is 1.5. More breaks the bound above; with mode="static" only more than 2 does.
            inf means no limit, with which mode="static" makes room for k values.
        owner_cap: Most values that one owner keeps, in units of k / P, at least 1, and at most k
            values. The default is 1.25; more breaks the bound above. inf means k values. Not with
            mode="static".
        momentum: m, in [0, 1). The default, 0, means none. Otherwise u = m u + gradient / P is
            added to the residual in place of gradient / P, and u is cleared, too, where it has
            arrived, as in DGC. The optimizer must then have no momentum.
        error_feedback: See `Compressor`.

    Raises:
        ValueError: If an option is out of its range, or excludes another one.
    """

    name: ClassVar[str] = "oktopk"
    is_scattered: ClassVar[bool] = True
    is_regional: ClassVar[bool] = True

    mode: str = "exact"
    tau: int = 64
    message_cap: float = 1.5
    owner_cap: float = 1.25
    momentum: float = 0.0

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("tau")
        self._check_name("mode", MODES)
        of_exact = self.tau_prime, self.owner_cap
        if self.is_static and of_exact != (OkTopk.tau_prime, OkTopk.owner_cap):
            raise ValueError(
                "tau_prime and owner_cap of oktopk have no effect with mode='static'. Leave them"
                " out: there thresholds are exact in every step, and an owner keeps k / P values."
            )
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum of oktopk must be in [0, 1), got {self.momentum}.")
        if self.momentum and not self.has_feedback:
            raise ValueError(
                "momentum of oktopk does not fit error_feedback=False. Leave out one of them:"
                " momentum is kept together with what has not been sent."
            )
        for name in ("message_cap", "owner_cap"):
            cap = getattr(self, name)
            if not cap >= 1:
                raise ValueError(f"{name} of oktopk must be at least 1, got {cap!r}.")

    @property
    @override
    def is_static(self) -> bool:
        """Tells whether messages always have the same length."""
        return self.mode == "static"

    @override
    def caps(self, k: int, world_size: int) -> tuple[int, int, int | None]:
        # Values beyond the caps wait in the residual.
        most = k if self.is_static else int(selectors.MOST * k)
        most_sent = int(min(most, self.message_cap * k / world_size))
        if self.is_static:
            return most, most_sent, k // world_size
        return most, most_sent, int(min(k, self.owner_cap * k / world_size))

    @override
    def are_regions_due(self, step: int) -> bool:
        # In the first steps residuals still grow, and large values move to other places.
        return step < NUM_FIRST_STEPS or step % self.tau == 0

    @property
    @override
    def brings_momentum(self) -> bool:
        return self.momentum > 0

    @override
    def most_words(self, numel: int, world_size: int) -> float:
        return 6 * self.entries(numel) * (world_size - 1) / world_size

    @override
    def usual_words(self, numel: int, world_size: int) -> float:
        if self.is_static:
            _, most_sent, most_owned = self.caps(self.entries(numel), world_size)
            return 2 * (most_sent + (most_owned or 0)) * (world_size - 1)
        return 4 * self.entries(numel) * (world_size - 1) / world_size
