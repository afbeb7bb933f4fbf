"""Sparse all-reduces: of each rank a few numbers are summed, wherever they stand in a bucket.

No codecs of rows: how many numbers travel to whom depends on the numbers. Their exchange is
`exchange/sparse.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_dear.compression.compressor import Kind
from lightning_dear.compression.density import FewOfMany
from lightning_dear.compression.thresholds import MOST, LocalThreshold

FEWEST_PER_RANK = 4
"""A bucket of which fewer numbers than this many for each rank would travel goes as it is."""

BOUNDARIES = ("histogram", "mean")
"""Names of how ranks agree where a bucket's regions end: see `OkTopk`."""


@dataclass(frozen=True, kw_only=True)
class SparseAllReduce(FewOfMany):
    """About `density` of each rank's gradients, and what it has left of earlier ones, are summed.

    Args:
        density: Share of a bucket's numbers; k = max(1, ceil(density numel)).
    """

    @property
    @override
    def kind(self) -> Kind:
        return "contractive"

    def saves(self, numel: int, world_size: int) -> bool:
        """Whether a bucket of `numel` numbers travels so. Of a single rank nothing travels."""
        return world_size > 1 and self.entries(numel) >= FEWEST_PER_RANK * world_size

    @abstractmethod
    def find(self, waiting: Tensor, k: int, threshold: LocalThreshold, step: int) -> Tensor:
        """Places of what a rank selects, ascending; zeros are not.

        Args:
            waiting: [numel] fp32; not mutated.
            k: About how many.
            threshold: What was found before; mutated.
            step: Number of the sparse step, from 0.
        """

    def most_selected(self, k: int) -> int:
        """Most numbers that a rank sends; of more the largest."""
        return k

    @abstractmethod
    def most_words(self, numel: int, world_size: int) -> float:
        """Most words of 4 bytes, values and places, that a rank sends, or receives, in a step."""

    def usual_words(self, numel: int, world_size: int) -> float:
        """How many it is where thresholds and regions are right."""
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
        self._check_period("tau_prime")

    def _check_period(self, name: str) -> None:
        period = getattr(self, name)
        if not isinstance(period, int) or period < 1:
            raise ValueError(f"{name} of {self.name} must be an integer >= 1, got {period!r}.")

    @override
    def find(self, waiting: Tensor, k: int, threshold: LocalThreshold, step: int) -> Tensor:
        return threshold.find(waiting, k, is_exact=step % self.tau_prime == 0)


@dataclass(frozen=True, kw_only=True)
class OkTopk(ByThreshold):
    """The sparse all-reduce of near-optimal volume, whose halves are those of DeAR.

    After Li and Hoefler 2022, "Near-Optimal Sparse Allreduce for Distributed Deep Learning",
    algorithm 1. In backward each rank takes the numbers of acc = gradient / P + residual that reach
    its local threshold, about k. Each goes to the owner of the region it lies in, and owners sum in
    rank order. Afterwards they keep what reaches the global threshold, about k of all, and send
    that to everybody: u. What of acc was sent and is in u is cleared, and the rest stays residual:
    sum of acc = u + sum of residuals. At most 6 k (P - 1) / P words of 4 bytes, values and places,
    are sent or received by a rank in a step, however many ranks there are.

    The local threshold is the k-th largest number, exactly, every `tau_prime` steps, and is used
    again in between, where it follows the count; it is set anew at once where fewer than 2 k / 3 or
    more than 4 k / 3 numbers reach it. The global one is the k-th largest sum, by the same rule, of
    all ranks' histograms.

    Regions are such that all ranks' selections have about as many numbers in each. They follow the
    selections of the step before, so that backward waits for nobody, every `tau` steps and in each
    of the first 64. Where they do not fit, caps keep the bound: what is beyond them stays in the
    residuals; the largest travel, of equal ones the first.

    Args:
        density: See `SparseAllReduce`.
        tau: Steps between new regions, at least 1.
        tau_prime: Steps between exact thresholds, at least 1.
        boundaries: "histogram": quantiles of where all ranks' selections lie. "mean": means of each
            rank's own quantiles, as in the paper.
        message_cap: Most numbers of one rank in one region, over k / P; at least 1; at most 1.5
            keeps the bound. inf: no limit.
        owner_cap: Most numbers that one owner keeps, over k / P, and all together at most k; at
            least 1; at most 1.25 keeps the bound. inf: no limit, not even k.
        momentum: m, in [0, 1). Above 0 what is added to the residual is u = m u + gradient / P, and
            u, too, is cleared where it has arrived, as in DGC; the optimizer must have none then.
        xi_every: Steps between measurements of how far u is from the k largest numbers of the sum
            of all ranks' acc (`figures_of` has it as xi), each of which sends three times what a
            dense step does; 0: never.
        lr_rescale: Whether what was left is multiplied by the last learning rate over the present
            one where a schedule changes it, so that with SGD it moves weights as far as it would
            have in its own step. With a rate of 0 it stays as it is until another one comes.
        error_feedback: See `Compressor`.
        allow_biased: See `Compressor`.

    Raises:
        ValueError: For options outside their range.
    """

    name: ClassVar[str] = "oktopk"

    tau: int = 64
    boundaries: str = "histogram"
    message_cap: float = 1.5
    owner_cap: float = 1.25
    momentum: float = 0.0
    xi_every: int = 0
    lr_rescale: bool = False

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_period("tau")
        if self.boundaries not in BOUNDARIES:
            raise ValueError(
                f"Unknown boundaries {self.boundaries!r} of oktopk; valid names:"
                f" {', '.join(BOUNDARIES)}."
            )
        if not isinstance(self.xi_every, int) or self.xi_every < 0:
            raise ValueError(
                f"xi_every of oktopk must be an integer of at least 0, got {self.xi_every!r}."
            )
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum of oktopk must be in [0, 1), got {self.momentum}.")
        if not isinstance(self.lr_rescale, bool):
            raise ValueError(
                f"lr_rescale of oktopk must be true or false, got {self.lr_rescale!r}."
            )
        for what, is_asked in ("keeps momentum", self.momentum), ("rescales", self.lr_rescale):
            if is_asked and not self.has_feedback:
                raise ValueError(
                    f"oktopk {what} what it has not sent, and error_feedback=False forgets that."
                    " Leave out one of them."
                )
        for name in ("message_cap", "owner_cap"):
            cap = getattr(self, name)
            if not cap >= 1:
                raise ValueError(f"{name} of oktopk must be at least 1, got {cap!r}.")

    @property
    @override
    def brings_momentum(self) -> bool:
        return self.momentum > 0

    @override
    def most_selected(self, k: int) -> int:
        return int(MOST * k)

    @override
    def most_words(self, numel: int, world_size: int) -> float:
        return 6 * self.entries(numel) * (world_size - 1) / world_size

    @override
    def usual_words(self, numel: int, world_size: int) -> float:
        return 4 * self.entries(numel) * (world_size - 1) / world_size


@dataclass(frozen=True, kw_only=True)
class TopkA(ByThreshold):
    """Every rank sends the k largest numbers of acc to all others, and everybody adds them up.

    What was not sent stays residual: sum of acc = u + sum of residuals. After Renggli et al. 2019,
    "SparCML", where it is the all-gather of sparse vectors: 2 k (P - 1) words, which grow with the
    number of ranks. All of it travels in backward, and nothing is gathered.

    Args:
        density: See `SparseAllReduce`.
        tau_prime: See `ByThreshold`.
        error_feedback: See `Compressor`.
        allow_biased: See `Compressor`.
    """

    name: ClassVar[str] = "topka"
    all_reduces: ClassVar[bool] = True

    @override
    def most_words(self, numel: int, world_size: int) -> float:
        return 2 * self.entries(numel) * (world_size - 1)


@dataclass(frozen=True, kw_only=True)
class Gaussiank(SparseAllReduce):
    """As `TopkA`, of what exceeds the threshold that a normal distribution of acc would have.

    That is |x - mean| > s q, with s its standard deviation and q the (1 - density / 2) quantile of
    the standard normal distribution (Shi et al. 2019, "Understanding Top-k Sparsification in
    Distributed Deep Learning"). How many these are depends on the tails; where all numbers are of
    one size it is none. At most k travel, the largest. Again sum of acc = u + sum of residuals.

    Args:
        density: See `SparseAllReduce`.
        error_feedback: See `Compressor`.
        allow_biased: See `Compressor`.
    """

    name: ClassVar[str] = "gaussiank"
    all_reduces: ClassVar[bool] = True

    @override
    def find(self, waiting: Tensor, k: int, threshold: LocalThreshold, step: int) -> Tensor:
        mean, deviation = waiting.mean(), waiting.std()
        quantile = NormalDist().inv_cdf(1 - self.density / 2)
        is_near = (waiting - mean).abs_() <= deviation * quantile
        # So that what is nan, or has a mean that is, is selected, and found.
        return (~is_near & (waiting != 0)).nonzero().view(-1)

    @override
    def most_words(self, numel: int, world_size: int) -> float:
        return 2 * self.entries(numel) * (world_size - 1)


@dataclass(frozen=True, kw_only=True)
class TopkDSA(ByThreshold):
    """Owners of equal regions add up all ranks' k largest numbers, and send all sums to everybody.

    What was not sent stays residual: sum of acc = u + sum of residuals. SparCML's split all-gather
    with a dynamic switch (Renggli et al. 2019): as sums of many ranks have ever more numbers, they
    travel as they are where half of the bucket or more is not 0. With numbers spread evenly from
    4 k (P - 1) / P words, if all ranks select the same, to (2 k + n) (P - 1) / P.

    Args:
        density: See `SparseAllReduce`.
        tau_prime: See `ByThreshold`.
        error_feedback: See `Compressor`.
        allow_biased: See `Compressor`.
    """

    name: ClassVar[str] = "topkdsa"

    @override
    def most_words(self, numel: int, world_size: int) -> float:
        """Where numbers are spread evenly."""
        return (2 * self.entries(numel) + numel) * (world_size - 1) / world_size


@dataclass(frozen=True, kw_only=True)
class GTopk(ByThreshold):
    """Pairs of ranks add up their k largest numbers and pass on k of the sums, up a tree.

    After Shi et al. 2019, "A Distributed Synchronous SGD Algorithm with Global Top-k
    Sparsification". The root's k sums go back down the tree: u. What a rank does not pass on it
    adds to its own residual, so that sum of acc = u + sum of residuals. ceil(log2 P) rounds there
    and as many back, of 2 k words each way. The rounds of all buckets come after backward.

    Args:
        density: See `SparseAllReduce`.
        tau_prime: See `ByThreshold`.
        error_feedback: See `Compressor`.
        allow_biased: See `Compressor`.
    """

    name: ClassVar[str] = "gtopk"
    all_reduces: ClassVar[bool] = True

    @override
    def most_words(self, numel: int, world_size: int) -> float:
        return 2 * self.entries(numel) * (world_size - 1).bit_length()
