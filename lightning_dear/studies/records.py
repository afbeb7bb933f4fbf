"""What `dear-bench` measures: a step, a rank's block, a block of all ranks; and on what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

COMPUTE_ALONE = "compute alone"
"""Name of the row that every rank trains for itself, with nothing sent."""


@dataclass(frozen=True)
class Step:
    """One optimizer step of one rank, or what is typical of many; None: not measured.

    Attributes:
        step_s: From the beginning of its first batch to that of the next step's, seconds.
        forward_s: In `training_step`, waits for parameters included.
        backward_s: In backward, waits for buckets included.
        exposed_reduce_scatter_s: Waited for gradients.
        exposed_all_gather_s: Waited for parameters.
        wire_bytes: Payload a rank sent.
    """

    step_s: float
    forward_s: float
    backward_s: float
    exposed_reduce_scatter_s: float | None = None
    exposed_all_gather_s: float | None = None
    wire_bytes: float | None = None

    @property
    def rest_s(self) -> float | None:
        """What is no wait of the two; None if they were not measured."""
        if self.exposed_reduce_scatter_s is None or self.exposed_all_gather_s is None:
            return None
        return self.step_s - self.exposed_reduce_scatter_s - self.exposed_all_gather_s


@dataclass(frozen=True, kw_only=True)
class Load:
    """What steps took of the machine; None: not measured.

    Attributes:
        host_bytes: That leave a host in a step, by its interface's counter, headers included.
        peak_memory_bytes: Most resident memory of a rank.
        cpu_per_rank: CPU seconds of a rank per second: 1 is one core.
        machine_use: Share of the machine's cores that was busy, 0 to 1.
        others_use: The same without encoding and decoding.
        codec_s: CPU seconds of encoding and decoding, per rank and step.
        num_buckets: Of the strategy's plan; None where it has none to tell of.
    """

    host_bytes: float | None = None
    peak_memory_bytes: int | None = None
    cpu_per_rank: float | None = None
    machine_use: float | None = None
    others_use: float | None = None
    codec_s: float | None = None
    num_buckets: int | None = None


@dataclass(frozen=True, kw_only=True)
class RankBlock(Load):
    """A block as one rank saw it.

    Attributes:
        rank: Which.
        steps: Its steps, without the warm-up.
    """

    rank: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, kw_only=True)
class Block(Step, Load):
    """One entry's steps in one round, over all ranks: medians of steps, each the mean over ranks.

    Attributes:
        entry: Name of the entry.
        number: Its place among the entries, from 0; ratios are to the first.
        round: From 0; below, blocks in which an entry looked for its best options.
        place: Place in the round, from 0.
        num_steps: Timed.
        compute_s: Median of the steps without both waits.
        note: What was found by tuning, for people.
    """

    entry: str
    number: int = 0
    round: int
    place: int
    num_steps: int
    compute_s: float | None = None
    note: str = ""


class Bounds(NamedTuple):
    """How short a step could be; None where a rate or the seconds of compute are unknown.

    Attributes:
        communication_ratio: Communication over compute: 2(P-1)/P x bytes / rate / (forward +
            backward), P links.
        bound_s: `max(forward + backward, bytes / rate)`: nothing that moves these bytes is faster.
        dear_bound_s: DeAR's own: `max(forward, all-gather) + max(backward, reduce-scatter)`.
    """

    communication_ratio: float | None = None
    bound_s: float | None = None
    dear_bound_s: float | None = None


@dataclass(frozen=True)
class Point:
    """What all entries of one comparison share, and how short a step could be there.

    Attributes:
        label: The overrides that set it apart from the other points; empty for a single one.
        model: Name of the model, as people know it.
        is_replay: Whether the model waits instead of computing.
        scale: What the model's bytes were divided by.
        link_rate_mbit: Rate of each link, 10^6 bits per second; None: unknown. With a scaled model
            it stands for a link that is `scale` times as fast: seconds are the same.
        rate_source: Where the rate comes from: "shaped", or "assumed" in the cluster's file.
        world_size: Ranks.
        model_bytes: All parameters of the scaled model, as they travel uncompressed.
        compute_source: Where the seconds come from: "profile", "measured" or "not measured".
        alone_forward_s: Forward without communication, seconds; None if unknown.
        alone_backward_s: Backward without communication, seconds; None if unknown.
        one_way_s: What each link takes to reduce-scatter, or to all-gather, the model.
        rig: Emulated hosts and their links in one line; empty on others.
    """

    label: str
    model: str = ""
    is_replay: bool = False
    scale: float = 1.0
    link_rate_mbit: float | None = None
    rate_source: str = "assumed"
    world_size: int = 1
    model_bytes: int | None = None
    compute_source: str = "not measured"
    alone_forward_s: float | None = None
    alone_backward_s: float | None = None
    one_way_s: float | None = None
    rig: str = ""

    @property
    def stands_for_mbit(self) -> float | None:
        """Rate of the links on which the whole model would take as long."""
        return None if self.link_rate_mbit is None else self.link_rate_mbit * self.scale

    @property
    def bounds(self) -> Bounds:
        """How short a step could be."""
        known = self.alone_forward_s, self.alone_backward_s, self.one_way_s
        if None in known:
            return Bounds()
        forward_s, backward_s, one_way_s = map(float, known)  # type: ignore[arg-type]
        return Bounds(
            communication_ratio=2 * one_way_s / (forward_s + backward_s),
            bound_s=max(forward_s + backward_s, 2 * one_way_s),
            dear_bound_s=max(forward_s, one_way_s) + max(backward_s, one_way_s),
        )


@dataclass(frozen=True, kw_only=True)
class Row(Load):
    """One entry at one point, over all rounds; None: not measured.

    Attributes:
        point: Where.
        entry: Name of the entry.
        num_steps: Steps that count, over all rounds.
        step_s: Median over the rounds, seconds.
        ratio: Step time over the first entry's: median of the rounds.
        ratio_min: Lowest of the rounds.
        ratio_max: Highest of the rounds.
        compute_s: Median of what is neither of the next two.
        exposed_reduce_scatter_s: Median seconds waited for gradients.
        exposed_all_gather_s: Median seconds waited for parameters.
        is_void: Whether a replayed model's ranks had too little CPU to wait as an accelerator does.
        note: What was found by tuning, for people.
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
    is_void: bool
    note: str = ""

    @property
    def over_bound(self) -> float | None:
        """Step time over `Bounds.bound_s`."""
        bound_s = self.point.bounds.bound_s
        return self.step_s / bound_s if bound_s else None

    @property
    def over_dear_bound(self) -> float | None:
        """Step time over `Bounds.dear_bound_s`."""
        bound_s = self.point.bounds.dear_bound_s
        return self.step_s / bound_s if bound_s else None


def one_way_bytes(model_bytes: float, num_links: int) -> float:
    """What each of `num_links` links must carry to reduce-scatter, or to all-gather, the model.

    Whoever shares a link may add up first, and share what comes: no schedule needs less.
    """
    return (num_links - 1) / num_links * model_bytes


def compute_for_ratio(ratio: float, model_bytes: int, num_links: int, rate: float | None) -> float:
    """Seconds of forward and backward for which communication takes `ratio` times as long.

    Args:
        ratio: 2(P-1)/P x bytes / rate / (forward + backward); greater than 0.
        model_bytes: All parameters, as they travel.
        num_links: P; at least 2.
        rate: Bytes per second of each link.

    Raises:
        ValueError: If there is no communication or its rate is not known.
    """
    if not ratio > 0:
        raise ValueError(f"ratio must be greater than 0, got {ratio}.")
    if num_links < 2 or rate is None:
        raise ValueError(
            f"ratio={ratio:g} needs at least two ranks, on links of known rate; set"
            " model.compute_s instead, or choose another cluster."
        )
    return 2 * one_way_bytes(model_bytes, num_links) / rate / ratio
