"""What the recipe compares: a model on a cluster, under every fusion; and what was tried."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_dear.planning.step import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Message
from lightning_dear.simulator import SimulatedStep

EXACT = "exact"
"""The fusion that tuners and MG-WFBP's rule are compared with."""


@dataclass(frozen=True)
class Trial:
    """A plan that a tuner has tried.

    Attributes:
        plan: Its name.
        num_buckets: How many it has.
        step_s: What a step with it takes, seconds.
    """

    plan: str
    num_buckets: int
    step_s: float

    @property
    def cap_mb(self) -> float | None:
        """Cap of its buckets, MiB; None if it was made by no cap."""
        # A plan keeps the options of its planner in its name alone.
        found = re.match(r"threshold\((\S+) MiB", self.plan)
        return float(found[1]) if found else None


@dataclass(frozen=True)
class Fused:
    """A model on a cluster, in the buckets of one fusion.

    Attributes:
        step: What a step takes.
        trials: What was tried, in this order; empty for what is no tuner.
    """

    step: SimulatedStep
    trials: tuple[Trial, ...] = ()

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.step.step_s

    @property
    def num_buckets(self) -> int:
        """How many there are."""
        return sum(one.kind in (REDUCE_SCATTER, ALL_REDUCE) for one in self._messages)

    @property
    def num_early(self) -> int:
        """How many of them are gathered while backward still runs."""
        return sum(one.kind == ALL_GATHER and one.after is not None for one in self._messages)

    @property
    def num_all_reduced(self) -> int:
        """How many of them are all-reduced."""
        return sum(one.kind == ALL_REDUCE for one in self._messages)

    @property
    def _messages(self) -> list[Message]:
        return self.step.program.messages

    def best_so_far_s(self) -> list[float]:
        """Return the shortest step of the first trial, of the first two, and so on; seconds."""
        return [min(one.step_s for one in self.trials[: n + 1]) for n in range(len(self.trials))]


@dataclass(frozen=True)
class Case:
    """One model on one cluster, under every fusion.

    Attributes:
        cluster: Its name.
        model: The profile's name.
        alone_s: Seconds of a step of one rank that sends nothing.
        fused: Fusion's name -> what comes of it, in the order of the config.
    """

    cluster: str
    model: str
    alone_s: float
    fused: Mapping[str, Fused]

    @property
    def best_s(self) -> float:
        """Seconds of the shortest step of all."""
        return min(one.step_s for one in self.fused.values())

    def loss(self, name: str) -> float:
        """By how many per cent `name`'s step is longer than the shortest."""
        return 100 * (self.fused[name].step_s / self.best_s - 1)

    def over(self, name: str, other: str) -> float:
        """By how many per cent `name`'s step is longer than `other`'s; negative if shorter."""
        return 100 * (self.fused[name].step_s / self.fused[other].step_s - 1)

    def trials_until(self, name: str, other: str, percent: float) -> int | None:
        """After how many trials `name` is within so many per cent of `other`; None: not at all."""
        enough_s = (1 + percent / 100) * self.fused[other].step_s
        best_s = self.fused[name].best_so_far_s()
        return next((n for n, step_s in enumerate(best_s, 1) if step_s <= enough_s), None)

    def trials_of_best(self, name: str) -> int:
        """After how many trials the tuner `name` has first met its best plan."""
        best_s = self.fused[name].best_so_far_s()
        return best_s.index(best_s[-1]) + 1
