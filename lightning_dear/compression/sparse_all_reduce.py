"""Sparse all-reduces: each rank selects a few values of a bucket, which are summed over all ranks.

They are not codecs, which encode rows to a fixed size: here it depends on the values how many of
them travel to which rank (except with OkTopk(mode="static")). `exchange/sparse/` sends the values
and sums them.

In formulas P is the number of ranks, n the number of elements of a bucket, k the number of values
wanted, acc a rank's gradient / P + residual, and u the mean gradient that all ranks get (in
`OkTopk.momentum` the velocity). A place is the index of a value in its bucket. A word is 4 bytes: a
value or a place. A sparse step of a bucket is a step in which the bucket does not travel
uncompressed.
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

from lightning_dear.compression import codec, selectors
from lightning_dear.compression.selectors import LocalThreshold

FEWEST_PER_RANK = 4
"""A bucket travels uncompressed if k is less than this many values for each rank."""

NUDGE, MOST_NUDGES = 1.02, 20
NUDGED_BELOW, NUDGED_ABOVE = 3 / 4, 5 / 4
"""`Gaussiank` multiplies or divides a threshold by NUDGE until the number of values above it is
between NUDGED_BELOW x k and NUDGED_ABOVE x k, but at most MOST_NUDGES times."""

Found = tuple[Tensor, Tensor]
"""(places, values): [n] int64 places, and the [n] fp32 values in these places."""


class SparseAllReduce(codec.FewOfMany):
    """Base of sparse all-reduces: each rank sends about k values of its gradient plus residual.

    Values that are not sent stay in the residual. How many steps they wait is estimated in the
    docstring of `TopK`. With a density of 1 buckets travel uncompressed.

    Args:
        density: Share of a bucket's elements that a rank selects, in (0, 1]. The default is 0.01,
            and k = max(1, ceil(density n)).
        error_feedback: See `Compressor`.
    """

    is_tree: ClassVar[bool] = False
    """Whether sums go from rank to rank up a tree of ranks, and the result goes back down."""

    is_regional: ClassVar[bool] = False
    """Whether each owner keeps only the largest sums of its region, about k over all owners, and
    regions are cut so that about as many selected values lie in each. If False, and if
    `is_scattered`, regions are equally long, and owners keep all sums."""

    @property
    def is_static(self) -> bool:
        """Tells whether a bucket's messages have the same length in every sparse step.

        If so, no rank has to wait for the length of a message. False in this base class.
        """
        return False

    @override
    def check_with(self, setting: codec.Setting) -> None:
        reason = "It sends the largest elements of the mean gradient, and no parameters."
        self._check_gathers_gradients(setting, reason)
        if not setting.decouple and not self.all_reduces:
            raise ValueError(
                f"decouple=False does not fit {self.name}. Leave out one of them: decouple=False"
                f" gathers nothing, and {self.name} gathers sums from the ranks that own them."
            )

    def saves(self, numel: int, world_size: int) -> bool:
        """Tells whether a bucket of `numel` elements is sent sparsely. If not, it is uncompressed.

        It is sent sparsely if there are several ranks, and if k is less than `numel` and at least
        `FEWEST_PER_RANK` x `world_size`.
        """
        # With one rank nothing is sent. If all values are sent, receivers need no places.
        return world_size > 1 and FEWEST_PER_RANK * world_size <= self.entries(numel) < numel

    @abstractmethod
    def find(self, waiting: Tensor, k: int, threshold: LocalThreshold, step: int) -> Found:
        """Selects what this rank sends of a bucket. Local.

        Args:
            waiting: [numel] fp32, gradient / P + residual; not mutated.
            k: Number of values wanted; about as many are returned.
            threshold: Threshold that the step before has left. Mutated, if this compressor selects
                by it (see `ByThreshold`).
            step: Number of sparse steps of the bucket before this one.

        Returns:
            Places, ascending, and the values in these places. No value is 0.
        """

    def caps(self, k: int, world_size: int) -> tuple[int, int, int | None]:
        """Returns the most values that a rank selects, puts into one message, and keeps as owner.

        If there are more values, the largest are taken, and the others stay in the residual.

        Returns:
            Most values that a rank selects; most values in one message; most values that one owner
            keeps, where None means all values of its region.
        """
        return k, k, None

    def is_exact(self, step: int) -> bool:
        """Tells whether thresholds are computed anew, exactly, in sparse step number `step`.

        Sparse steps count from 0. Always True in this base class.
        """
        return True

    def are_regions_due(self, step: int) -> bool:
        """Tells whether new regions are made from what ranks select in sparse step number `step`.

        Sparse steps count from 0. Always False in this base class.
        """
        return False

    def most_words(self, numel: int, world_size: int) -> float:
        """Returns the most words that a rank sends in a sparse step of one bucket.

        A rank receives at most as many words. Gradients that come after their bucket was sent are
        not counted, since the bucket is then sent a second time. In this base class each rank sends
        its k values and their places to all other ranks.

        Args:
            numel: Elements of the bucket.
            world_size: Number of ranks.
        """
        return 2 * self.entries(numel) * (world_size - 1)

    def usual_words(self, numel: int, world_size: int) -> float:
        """Returns an estimate of the words that a rank sends in a sparse step without exceptions.

        That is a step with exact thresholds and regions of about as many selected values each. Same
        as `most_words` in this base class.
        """
        return self.most_words(numel, world_size)


@dataclass(frozen=True, kw_only=True)
class ByThreshold(SparseAllReduce):
    """Base of sparse all-reduces that select with a `LocalThreshold`, which is kept between steps.

    Args:
        density: See `SparseAllReduce`.
        tau_prime: Every `tau_prime`-th sparse step the threshold is computed anew, exactly; at
            least 1. The default is 32.
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


class TopkA(ByThreshold):
    """Sends about the k largest elements of acc to all other ranks; u is the sum on each rank.

    Values that a rank has not sent stay in its residual: sum of acc = u + sum of residuals. This is
    the all-gather of sparse vectors of Renggli et al. 2019, "SparCML". A rank sends at most
    2 k (P - 1) words, which grow with the number of ranks. All of them are sent in backward, and
    nothing is gathered afterwards.

    Args:
        density: See `SparseAllReduce`.
        tau_prime: See `ByThreshold`.
        error_feedback: See `Compressor`.
    """

    name: ClassVar[str] = "topka"
    all_reduces: ClassVar[bool] = True


class Gaussiank(SparseAllReduce):
    """Does what `TopkA` does, with a threshold computed as if acc were normally distributed.

    An element of acc is selected if |acc - mean| > s q, with s the standard deviation of acc and q
    the (1 - density / 2) quantile of the standard normal distribution (Shi et al. 2019,
    "Understanding Top-k Sparsification in Distributed Deep Learning"). Since real distributions
    differ, the threshold s q is raised or lowered by 2 % at a time, at most 20 times, until between
    3 k / 4 and 5 k / 4 elements exceed it, as in the experiments of Ok-Topk's paper. If no element
    exceeds it, such as when all have the same value, the k largest are selected, since they would
    otherwise wait for ever.

    If more than k elements are selected, the k largest of them are sent. All others stay in the
    residual: sum of acc = u + sum of residuals. If only a few elements exceed the threshold after
    20 corrections, elements wait several times as long as with `TopkA`.

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
        # `all_above` selects nan, too. So if acc contains nan, nan is sent, and all ranks notice
        # that the step has overflowed.
        places = selectors.all_above(distances, _nudged(distances, floor, k))
        if not len(places):
            places = selectors.largest(waiting, k)
        found = waiting.index_select(0, places)
        kept = selectors.true_places(found != 0)
        return places.index_select(0, kept), found.index_select(0, kept)


def _nudged(distances: Tensor, floor: float, k: int) -> float:
    """Returns the threshold `floor`, corrected until about k of `distances` exceed it.

    Gives up after `MOST_NUDGES` corrections, and returns the threshold reached by then.
    """
    for _ in range(MOST_NUDGES):
        count = np.count_nonzero(distances.numpy() > floor)
        if NUDGED_BELOW * k <= count <= NUDGED_ABOVE * k:
            break
        floor *= NUDGE if count > k else 1 / NUDGE
    return floor


class TopkDSA(ByThreshold):
    """Sends each rank's k largest elements of acc to owners of equal regions, which send all sums.

    Each owner sums what arrives for its region, and sends the sums to all ranks: u. Values that a
    rank has not sent stay in its residual: sum of acc = u + sum of residuals. This is the split
    all-gather with a dynamic switch of Renggli et al. 2019, "SparCML": if half of all sums of a
    bucket or more are not 0, sums travel without places. If values are spread evenly over regions,
    a rank sends from 4 k (P - 1) / P words, if all ranks select the same places, to
    (2 k + n) (P - 1) / P words, if no sum is 0.

    Args:
        density: See `SparseAllReduce`.
        tau_prime: See `ByThreshold`.
        error_feedback: See `Compressor`.
    """

    name: ClassVar[str] = "topkdsa"
    is_scattered: ClassVar[bool] = True

    @override
    def most_words(self, numel: int, world_size: int) -> float:
        """Returns the words that a rank sends in a step in which no sum is 0."""
        return (2 * self.entries(numel) + numel) * (world_size - 1) / world_size

    @override
    def usual_words(self, numel: int, world_size: int) -> float:
        """Returns the words that a rank sends if each rank selects places at random."""
        k = self.entries(numel)
        some = 1 - (1 - k / numel) ** world_size
        return (2 * k + min(2 * some, 1) * numel) * (world_size - 1) / world_size


class GTopk(ByThreshold):
    """Adds the k largest elements of two ranks' acc, and passes the k largest sums on, up a tree.

    The k sums of the root go back down the tree to all ranks: u (Shi et al. 2019, "A Distributed
    Synchronous SGD Algorithm with Global Top-k Sparsification"). A rank adds the sums that it does
    not pass on to its residual, so that sum of acc = u + sum of residuals. There are ceil(log2 P)
    messages one after the other up the tree and as many down, of at most 2 k words each. They are
    sent after backward, one bucket after the other, so that no computation hides them.

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
"""Values of `OkTopk.mode`. "exact": messages are as long as their content. "static": messages have
a fixed length."""

NUM_FIRST_STEPS = 64
"""Number of sparse steps at the beginning of training in which `OkTopk` makes new regions in every
step, since residuals still grow. Later it does so every `OkTopk.tau` steps."""


@dataclass(frozen=True, kw_only=True)
class OkTopk(ByThreshold):
    """Sums sparse values with near-optimal volume: reduce to owners of regions, then all-gather.

    After Li and Hoefler 2022, "Near-Optimal Sparse Allreduce for Distributed Deep Learning",
    algorithm 1. In backward each rank takes the values of acc = gradient / P + residual that reach
    its local threshold, about k, and sends each to the owner of the region in which it lies. Owners
    sum in rank order. Then they keep the largest sums, about k in all, and send these to all ranks:
    u. A sent value is taken out of the residual if its place is in u. All other values stay in the
    residual: sum of acc = u + sum of residuals. A rank sends, and receives, at most 6 k (P - 1) / P
    words in a step in which each bucket is sent once, however many ranks there are.

    Local threshold: every `tau_prime` steps it is set to the k-th largest magnitude, exactly. In
    between it is used again, corrected by Hill's estimate of the tail. It is set anew, too, if
    fewer than 2 k / 3 or more than 4 k / 3 values reach it. Global threshold: in the first step,
    every `tau_prime` steps and after a change of density, owners find the k largest of all sums by
    histograms. In between each owner keeps a quota of its largest sums: k times its share, in the
    step before, of all sums that reached the global threshold of that step. The counts travel with
    the messages of that step, so that no rank waits for them. (In the paper owners keep all sums
    that reach the threshold, be they more or fewer than k.)

    Regions are cut so that about as many selected values lie in each. New regions are made every
    `tau` steps and in each of the first 64. They are used from the following step on, so that no
    backward waits for other ranks. If more values lie in a region than a message may hold, the
    largest of them are sent (of equal values the first), and all others stay in the residual. That
    keeps the bound above.

    Mode "static" is for NCCL: messages are always as long as the caps allow, so that no host waits
    for lengths. There are no thresholds: each rank takes its k largest values, of equal ones any,
    and each owner keeps its k / P largest sums. If large sums are unevenly spread over regions,
    fewer than k sums are sent, and the rest stays in the residuals. A rank sends at most
    2 (message_cap + 1) k (P - 1) / P words a step, which is 5 k (P - 1) / P with the default cap.

    Args:
        density: See `SparseAllReduce`.
        mode: "exact" (the default) sends messages as long as their content, with gloo only.
            "static" sends messages of a fixed length.
        tau: Every `tau`-th step makes new regions; at least 1. The default is 64.
        tau_prime: Every `tau_prime`-th step computes thresholds exactly; at least 1. The default is
            32. Any other value is refused with mode="static".
        message_cap: Most values that a rank sends to one region, in units of k / P, at least 1. The
            default is 1.5. With more, the bound above does not hold (with mode="static", with more
            than 2). inf means no limit; mode="static" then makes room for k values.
        owner_cap: Most values that one owner keeps, in units of k / P, at least 1; at most k values
            are kept in any case. The default is 1.25. With more, the bound above does not hold. inf
            means k values. Any other value than the default is refused with mode="static".
        momentum: m, in [0, 1). The default, 0, means no momentum. Otherwise each rank keeps a
            velocity, u = m u + gradient / P, which is added to the residual in place of
            gradient / P. Where a value has arrived, the velocity is set to 0, too, as in `DGC`. An
            optimizer with momentum is then refused.
        error_feedback: See `Compressor`.

    Raises:
        ValueError: If an option is out of its range, or excludes another option.
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
        self._check_value("momentum", "in [0, 1)", is_valid=0 <= self.momentum < 1)
        if self.momentum and not self.has_feedback:
            raise ValueError(
                "momentum of oktopk does not fit error_feedback=False. Leave out one of them:"
                " momentum is kept together with what has not been sent."
            )
        for name in ("message_cap", "owner_cap"):
            self._check_value(name, "at least 1", is_valid=getattr(self, name) >= 1)

    @property
    @override
    def is_static(self) -> bool:
        """Tells whether messages have a fixed length: mode="static"."""
        return self.mode == "static"

    @override
    def caps(self, k: int, world_size: int) -> tuple[int, int, int | None]:
        # The local threshold may select up to MOST x k values before it is set anew.
        most = k if self.is_static else int(selectors.MOST * k)
        most_sent = int(min(most, self.message_cap * k / world_size))
        most_owned = min(k, self.owner_cap * k / world_size)
        return most, most_sent, k // world_size if self.is_static else int(most_owned)

    @override
    def are_regions_due(self, step: int) -> bool:
        # In the first steps residuals still grow, so that regions of an earlier step soon hold
        # unequal numbers of selected values.
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
