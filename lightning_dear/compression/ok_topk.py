"""Ok-Topk, the sparse all-reduce of near-optimal volume: its options, and how much it sends."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from typing_extensions import override

from lightning_dear.compression.sparse_all_reduce import ByThreshold
from lightning_dear.compression.thresholds import MOST

MODES = ("exact", "static")
"""Names of how numbers are sent: see `OkTopk`."""

NUM_FIRST_STEPS = 64
"""Steps at the beginning in each of which regions are made anew: residuals still grow."""

_OF_EXACT_MODE = {
    "tau_prime": "thresholds are exact in every step",
    "owner_cap": "an owner keeps k / P numbers",
}
"""Option that mode "static" does not have -> why."""


@dataclass(frozen=True, kw_only=True)
class OkTopk(ByThreshold):
    """The sparse all-reduce of near-optimal volume, whose halves are those of DeAR.

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
        allow_biased: See `Compressor`.

    Raises:
        ValueError: For options outside their range.
    """

    name: ClassVar[str] = "oktopk"
    is_regional: ClassVar[bool] = True

    mode: str = "exact"
    tau: int = 64
    message_cap: float = 1.5
    owner_cap: float = 1.25
    momentum: float = 0.0

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_period("tau")
        if self.mode not in MODES:
            raise ValueError(
                f"Unknown mode {self.mode!r} of oktopk; valid names: {', '.join(MODES)}."
            )
        if self.is_static:
            self._check_static()
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

    def _check_static(self) -> None:
        for one in fields(self):
            if one.name in _OF_EXACT_MODE and getattr(self, one.name) != one.default:
                raise ValueError(
                    f"{one.name} of oktopk has no effect with mode='static', in which"
                    f" {_OF_EXACT_MODE[one.name]}. Leave it out."
                )

    @property
    @override
    def is_static(self) -> bool:
        """Whether always as many numbers travel."""
        return self.mode == "static"

    @override
    def most_sent(self, k: int, world_size: int) -> int:
        """Most numbers of one rank in one region; in mode "static" always as many."""
        # Beyond the cap numbers wait in the residual.
        most = k if self.is_static else self.most_selected(k)
        return int(min(most, self.message_cap * k / world_size))

    @override
    def most_owned(self, k: int, world_size: int) -> int:
        if self.is_static:
            return k // world_size
        return int(min(k, self.owner_cap * k / world_size))

    @override
    def are_regions_due(self, step: int) -> bool:
        # Early on residuals still grow, and what is large moves.
        return step < NUM_FIRST_STEPS or step % self.tau == 0

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
        if self.is_static:
            k = self.entries(numel)
            room = self.most_sent(k, world_size) + self.most_owned(k, world_size)
            return 2 * room * (world_size - 1)
        return 4 * self.entries(numel) * (world_size - 1) / world_size
