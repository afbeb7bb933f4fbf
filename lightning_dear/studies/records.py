"""What is measured: one step, one block of one rank, one block of all ranks, one point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import mean
from typing import Any

from lightning_dear.studies.bounds import Bounds

COMPUTE_ALONE = "compute alone"
"""Name of the row that every rank trains for itself, with nothing sent."""


@dataclass(frozen=True)
class Step:
    """One optimizer step of one rank; None: not measured.

    Attributes:
        step_s: From the beginning of its first batch to that of the next step's, seconds.
        forward_s: In `training_step`, waits for parameters included.
        backward_s: In backward, waits for buckets included.
        exposed_reduce_scatter_s: Waited for gradients.
        exposed_all_gather_s: Waited for parameters.
        wire_bytes: Payload this rank sent.
    """

    step_s: float
    forward_s: float
    backward_s: float
    exposed_reduce_scatter_s: float | None = None
    exposed_all_gather_s: float | None = None
    wire_bytes: float | None = None


@dataclass(frozen=True)
class RankBlock:
    """A block as one rank saw it.

    Attributes:
        rank: Which.
        steps: Its steps, without the warm-up.
        cpu_s: CPU time of the rank's process during those steps, seconds.
        wall_s: What those steps took, seconds.
        machine_use: Share of the machine's cores that was busy meanwhile, 0 to 1.
        interface_bytes: What the host's interface sent meanwhile, headers included, for all its
            ranks.
        peak_memory_bytes: Most resident memory since the block began.
        num_buckets: Buckets of the strategy's plan; None where it has none to tell of.
        codec_cpu_s: CPU time of encoding and decoding, part of `cpu_s`.
        codec_use: Share of the machine's cores that all its ranks encoded on, if all are alike.
    """

    rank: int
    steps: tuple[Step, ...]
    cpu_s: float
    wall_s: float
    machine_use: float | None
    interface_bytes: int | None
    peak_memory_bytes: int | None
    num_buckets: int | None = None
    codec_cpu_s: float = 0.0
    codec_use: float = 0.0


@dataclass(frozen=True)
class Block:
    """One entry's steps in one round, on all ranks.

    Attributes:
        entry: Name of the entry.
        round_number: From 0; below, blocks in which an entry looked for its best options.
        place: Place in the round, from 0.
        ranks: In rank order.
    """

    entry: str
    round_number: int
    place: int
    ranks: tuple[RankBlock, ...]

    @property
    def steps(self) -> list[Step]:
        """Every step, as the mean over its ranks.

        Ranks wait for each other and keep pace, but a rank that is late in one step is short in the
        next. The longest of each step would therefore add up to more than the time that passed, by
        up to 2 % where ranks are loosely coupled, and by nothing under DDP.
        """
        return [
            _mean_of(column) for column in zip(*(rank.steps for rank in self.ranks), strict=True)
        ]


def _mean_of(steps: Sequence[Step]) -> Step:
    """The mean of each figure; None where a rank has none."""
    figures: dict[str, Any] = {}
    for one in fields(Step):
        values = [getattr(step, one.name) for step in steps]
        figures[one.name] = None if None in values else mean(values)
    return Step(**figures)


@dataclass(frozen=True)
class Point:
    """What all entries of one comparison share.

    Attributes:
        label: The overrides that set it apart from the other points; empty for a single one.
        model: Name of the model, as people know it.
        scale: What the model's bytes were divided by.
        link_rate_mbit: Rate of each link, 10^6 bits per second; None: unknown. With a scaled model
            it stands for a link that is `scale` times as fast: seconds are the same.
        rate_source: Where the rate comes from: "shaped", or "assumed" in the cluster's file.
        is_replay: Whether the model waits instead of computing.
        compute_source: Where the bounds' compute comes from: "profile" or "measured".
        bounds: Of the scaled model on the link that was really used.
        rig: Emulated hosts and their links in one line; empty on others.
    """

    label: str
    model: str
    scale: float
    link_rate_mbit: float | None
    rate_source: str
    is_replay: bool
    compute_source: str
    bounds: Bounds
    rig: str = ""


@dataclass(frozen=True)
class Row:
    """One entry at one point, over all rounds; None: not measured.

    Attributes:
        point: Where.
        entry: Name of the entry.
        num_steps: Steps that count, over all rounds.
        step_s: Median of the steps, each the mean over its ranks, in seconds.
        ratio: Step time over the first entry's: median of the rounds.
        ratio_min: Lowest of the rounds.
        ratio_max: Highest of the rounds.
        compute_s: Median of what is neither of the next two.
        exposed_reduce_scatter_s: Median seconds waited for gradients.
        exposed_all_gather_s: Median seconds waited for parameters.
        host_bytes: That leave a host in a step, by its interface's counter, headers included.
        peak_memory_bytes: Of the rank and round with most.
        cpu_per_rank: CPU seconds of a rank per second: 1 is one core.
        machine_use: Share of the machine's cores in the busiest round, 0 to 1.
        is_void: Whether a replayed model's ranks had too little CPU to wait as an accelerator does.
        num_buckets: Buckets of the plan; None where there is none to tell of.
        note: What was found by tuning, for people.
        codec_s: CPU seconds of encoding and decoding, per rank and step. What is charged for a
            whole model's is not in it, and it does not make a row void.
    """

    point: Point
    entry: str
    num_steps: int
    step_s: float
    ratio: float | None
    ratio_min: float | None
    ratio_max: float | None
    compute_s: float | None
    exposed_reduce_scatter_s: float | None
    exposed_all_gather_s: float | None
    host_bytes: float | None
    peak_memory_bytes: int | None
    cpu_per_rank: float
    machine_use: float | None
    is_void: bool
    num_buckets: int | None = None
    note: str = ""
    codec_s: float = 0.0

    @property
    def over_bound(self) -> float | None:
        """Step time over `max(forward + backward, bytes / rate)`."""
        bound_s = self.point.bounds.step_s
        return self.step_s / bound_s if bound_s else None

    @property
    def over_dear_bound(self) -> float | None:
        """Step time over `max(forward, all-gather) + max(backward, reduce-scatter)`."""
        bound_s = self.point.bounds.dear_s
        return self.step_s / bound_s if bound_s else None
