"""Sparse all-reduces: of each rank a few numbers are summed, wherever they stand in a bucket.

No codecs of rows: how many numbers travel to whom depends on the numbers. Their exchange is
in `exchange/sparse/`.
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
"""A bucket of which fewer numbers than this many for each rank would travel goes as it is."""

NUDGE, MOST_NUDGES = 1.02, 20
NUDGED_BELOW, NUDGED_ABOVE = 3 / 4, 5 / 4
"""How `Gaussiank` corrects a threshold, how often at most, and beyond which shares of k."""

Found = tuple[Tensor, Tensor]
"""[n] int64 places of numbers, and these, [n] fp32."""


@dataclass(frozen=True, kw_only=True)
class SparseAllReduce(FewOfMany):
    """Sums about `density` of each rank's gradients, and of what earlier ones have left.

    How long a number waits is as in `TopK`. With a density of 1 buckets travel as they are.

    Args:
        density: Share of a bucket's numbers; k = max(1, ceil(density numel)).
    """

    kind: ClassVar[Kind] = "contractive"
    is_tree: ClassVar[bool] = False
    """Whether sums go from rank to rank up a tree, and back down it."""

    is_regional: ClassVar[bool] = False
    """Whether owners keep about k of the sums, of regions that follow ranks' selections; otherwise
    those of equal regions keep all."""

    @property
    def is_static(self) -> bool:
        """Tells whether always as many numbers travel."""
        return False

    @override
    def check_with(self, setting: Setting) -> None:
        sends = "sends the mean gradient's largest elements"
        no_use = "gather='parameters' has no use for these"
        self._check_gathers_gradients(setting, f"{sends}, and {no_use}")
        if not setting.decouple and not self.all_reduces:
            raise ValueError(
                f"decouple=False gathers nothing after the step, and {self.name} gathers what"
                " owners have selected. Leave out one of them."
            )

    def saves(self, numel: int, world_size: int) -> bool:
        """Tells whether a bucket of `numel` numbers travels so. A single rank sends nothing."""
        # Nothing is left out of all numbers, and their places would be sent for nothing.
        return world_size > 1 and FEWEST_PER_RANK * world_size <= self.entries(numel) < numel

    @abstractmethod
    def find(self, waiting: Tensor, k: int, threshold: LocalThreshold, step: int) -> Found:
        """Returns places of what a rank selects, ascending, and the values; zeros are not.

        Args:
            waiting: [numel] fp32; not mutated.
            k: About how many.
            threshold: What was found before; mutated.
            step: Number of the sparse step, from 0.
        """

    def caps(self, k: int, world_size: int) -> tuple[int, int, int | None]:
        """Returns most numbers that a rank selects, and sends in one message; of more the largest.

        And most that one owner keeps; None: all of its region.
        """
        return k, k, None

    def is_exact(self, step: int) -> bool:
        """Tells whether thresholds are set anew in sparse step 0, 1, ..."""
        return True

    def are_regions_due(self, step: int) -> bool:
        """Tells whether regions of the step after `step` follow the selections of that one."""
        return False

    def most_words(self, numel: int, world_size: int) -> float:
        """Returns the most 4-byte words, values and places, that a rank sends or gets in a step.

        As it is: where all that is selected goes to all other ranks.
        """
        return 2 * self.entries(numel) * (world_size - 1)

    def usual_words(self, numel: int, world_size: int) -> float:
        """Returns how many words it is where thresholds and regions are right."""
        return self.most_words(numel, world_size)


@dataclass(frozen=True, kw_only=True)
class ByThreshold(SparseAllReduce):
    """Selects by a threshold that is used again: see `LocalThreshold`.

    Args:
        density: See `SparseAllReduce`.
        tau_prime: Steps between exact thresholds, at least 1.
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
    """Sends the k largest numbers of acc to all other ranks, and everybody adds them up.

    What was not sent stays residual: sum of acc = u + sum of residuals. After Renggli et al. 2019,
    "SparCML", where it is the all-gather of sparse vectors: 2 k (P - 1) words, which grow with the
    number of ranks. All of it travels in backward, and nothing is gathered.

    Args:
        density: See `SparseAllReduce`.
        tau_prime: See `ByThreshold`.
        error_feedback: See `Compressor`.
    """

    name: ClassVar[str] = "topka"
    all_reduces: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Gaussiank(SparseAllReduce):
    """Works as `TopkA`, with the threshold that a normal distribution of acc would have.

    That is |x - mean| > s q, with s its standard deviation and q the (1 - density / 2) quantile of
    the standard normal distribution (Shi et al. 2019, "Understanding Top-k Sparsification in
    Distributed Deep Learning"). As the tails are others, the threshold is then corrected by 2 % at
    a time, at most 20 times, until 3 k / 4 to 5 k / 4 numbers exceed it, as in the experiments of
    Ok-Topk's paper. Where that leaves none, as where all numbers are of one size, the k largest are
    selected: they would wait for ever. At most k travel, the largest. Again sum of acc = u + sum of
    residuals. Where 20 corrections leave a few, numbers wait several times as long as with `TopkA`.

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
        # So that what is nan, or has a mean that is, is selected, and found.
        places = selectors.all_above(distances, _nudged(distances, floor, k))
        if not len(places):
            places = selectors.largest(waiting, k)
        found = waiting.index_select(0, places)
        kept = selectors.true_places(found != 0)
        return places.index_select(0, kept), found.index_select(0, kept)


def _nudged(distances: Tensor, floor: float, k: int) -> float:
    """The floor, corrected until about k of `distances` exceed it."""
    for _ in range(MOST_NUDGES):
        count = np.count_nonzero(distances.numpy() > floor)
        if NUDGED_BELOW * k <= count <= NUDGED_ABOVE * k:
            break
        floor *= NUDGE if count > k else 1 / NUDGE
    return floor


@dataclass(frozen=True, kw_only=True)
class TopkDSA(ByThreshold):
    """Lets owners of equal regions sum all ranks' k largest numbers, and send all sums.

    What was not sent stays residual: sum of acc = u + sum of residuals. SparCML's split all-gather
    with a dynamic switch (Renggli et al. 2019): as sums of many ranks have ever more numbers, they
    travel as they are where half of the bucket or more is not 0. With numbers spread evenly from
    4 k (P - 1) / P words, if all ranks select the same, to (2 k + n) (P - 1) / P.

    Args:
        density: See `SparseAllReduce`.
        tau_prime: See `ByThreshold`.
        error_feedback: See `Compressor`.
    """

    name: ClassVar[str] = "topkdsa"
    is_scattered: ClassVar[bool] = True

    @override
    def most_words(self, numel: int, world_size: int) -> float:
        """Returns the words where all sums are not 0."""
        return (2 * self.entries(numel) + numel) * (world_size - 1) / world_size

    @override
    def usual_words(self, numel: int, world_size: int) -> float:
        """Returns the words if ranks select by chance; sums are dense if half are not 0."""
        k = self.entries(numel)
        some = 1 - (1 - k / numel) ** world_size
        return (2 * k + min(2 * some, 1) * numel) * (world_size - 1) / world_size


@dataclass(frozen=True, kw_only=True)
class GTopk(ByThreshold):
    """Adds up pairs of ranks' k largest numbers, and passes on k of the sums, up a tree.

    After Shi et al. 2019, "A Distributed Synchronous SGD Algorithm with Global Top-k
    Sparsification". The root's k sums go back down the tree: u. What a rank does not pass on it
    adds to its own residual, so that sum of acc = u + sum of residuals. ceil(log2 P) rounds there
    and as many back, of 2 k words each way. The rounds of all buckets come after backward.

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
"""Names of how numbers are sent: see `OkTopk`."""

NUM_FIRST_STEPS = 64
"""Steps at the beginning in each of which regions are made anew: residuals still grow."""


@dataclass(frozen=True, kw_only=True)
class OkTopk(ByThreshold):
    """Sums sparse numbers with near-optimal volume, in two halves as DeAR's.

    After Li and Hoefler 2022, "Near-Optimal Sparse Allreduce for Distributed Deep Learning",
    algorithm 1. In backward each rank takes the numbers of acc = gradient / P + residual that reach
    its local threshold, about k. Each goes to the owner of the region it lies in, and owners sum in
    rank order. Afterwards they keep the largest sums, k of all, and send these to everybody: u.
    What of acc was sent and is in u is cleared, and the rest stays residual: sum of acc = u + sum
    of residuals. At most 6 k (P - 1) / P words of 4 bytes, values and places, are sent or received
    by a rank in a step of one round, however many ranks there are.

    The local threshold is the k-th largest number, exactly, every `tau_prime` steps, and is used
    again in between, where it follows the count by Hill's estimate of the tail; it is set anew at
    once where fewer than 2 k / 3 or more than 4 k / 3 numbers reach it. In the first step, every
    `tau_prime` steps and after a change of density owners keep the k largest sums of all, found by
    histograms. In between each keeps the largest of
    its own, as many as are its share of k: the share it had in the last step of all sums that
    reached the last global threshold. That is told with the messages, so that no rank waits for it.
    (In the paper owners keep what reaches the threshold, be it more or fewer than k.)

    Regions are such that all ranks' selections have about as many numbers in each. They follow the
    selections of the step before, so that backward waits for nobody, every `tau` steps and in each
    of the first 64. Where they do not fit, caps keep the bound: what is beyond them stays in the
    residuals. Of a message the largest travel, of equal ones the first.

    Mode "static" is for NCCL: always as many numbers travel as caps allow, so that no host waits
    for a count. Each rank takes its k largest, of equal ones any, and an owner keeps its k / P
    largest sums: there are no thresholds. Where regions do not fit, less than k of the sums travel,
    and the rest stays in the residuals. At most 2 (message_cap + 1) k (P - 1) / P words, in every
    step: 5 k (P - 1) / P as it is.

    Args:
        density: See `SparseAllReduce`.
        mode: "exact": messages are as long as what is in them (gloo only). "static": see above.
        tau: Steps between new regions, at least 1.
        tau_prime: Steps between exact thresholds, at least 1. Not with mode="static".
        message_cap: Most numbers of one rank in one region, over k / P; at least 1; at most 1.5
            keeps the bound, and with mode="static" at most 2. inf: no limit; with mode="static"
            there is always room for k then.
        owner_cap: Most numbers that one owner keeps, over k / P, and all together at most k; at
            least 1; at most 1.25 keeps the bound. inf: no limit but k. Not with mode="static".
        momentum: m, in [0, 1). Above 0 what is added to the residual is u = m u + gradient / P, and
            u, too, is cleared where it has arrived, as in DGC; the optimizer must have none then.
        error_feedback: See `Compressor`.

    Raises:
        ValueError: For options outside their range.
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
                "tau_prime and owner_cap of oktopk have no effect with mode='static', in which"
                " thresholds are exact in every step and an owner keeps k / P numbers. Leave them"
                " out."
            )
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum of oktopk must be in [0, 1), got {self.momentum}.")
        if self.momentum and not self.has_feedback:
            raise ValueError(
                "oktopk keeps momentum of what it has not sent, and error_feedback=False forgets"
                " that. Leave out one of them."
            )
        for name in ("message_cap", "owner_cap"):
            cap = getattr(self, name)
            if not cap >= 1:
                raise ValueError(f"{name} of oktopk must be at least 1, got {cap!r}.")

    @property
    @override
    def is_static(self) -> bool:
        """Tells whether always as many numbers travel."""
        return self.mode == "static"

    @override
    def caps(self, k: int, world_size: int) -> tuple[int, int, int | None]:
        # Beyond them numbers wait in the residual.
        most = k if self.is_static else int(selectors.MOST * k)
        most_sent = int(min(most, self.message_cap * k / world_size))
        if self.is_static:
            return most, most_sent, k // world_size
        return most, most_sent, int(min(k, self.owner_cap * k / world_size))

    @override
    def are_regions_due(self, step: int) -> bool:
        # Early on residuals still grow, and what is large moves.
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
