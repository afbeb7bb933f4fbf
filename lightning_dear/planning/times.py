"""What one step takes without communication, and when each tensor is due in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from lightning_dear.planning.plan import BucketSpec


@dataclass(frozen=True)
class ModelTimes:
    """Seconds of one step without any communication.

    Attributes:
        forward_s: Length of the forward.
        backward_s: Length of the backward.
        first_use_s: Tensor index -> seconds from the forward's beginning to its first read. A
            tensor that is missing is not read in forward.
        ready_s: Tensor index -> seconds from the backward's beginning to its gradient. A tensor
            that is missing got no gradient and is sent when backward has ended.
        step_s: Optimizer step on this rank's shards, all buckets together.
        late_step_s: Optimizer step of whole buckets, all together, each where forward first reads
            it; for gather="gradients".
        allows_early: Whether buckets may be stepped and gathered before backward has ended.
        allows_all_reduce: Whether buckets may be all-reduced.
        allows_cuts: Whether a tensor may be cut between two buckets.
    """

    forward_s: float
    backward_s: float
    first_use_s: Mapping[int, float]
    ready_s: Mapping[int, float]
    step_s: float = 0.0
    late_step_s: float = 0.0
    allows_early: bool = True
    allows_all_reduce: bool = True
    allows_cuts: bool = True

    def ready_of(self, bucket: BucketSpec) -> float:
        """When the last gradient of `bucket` is there, seconds since backward began."""
        return max(self.ready_s.get(piece.tensor, self.backward_s) for piece in bucket.slices)

    def first_use_of(self, bucket: BucketSpec) -> float:
        """When forward first reads from `bucket`, seconds since it began; at the latest its end."""
        return min(self.first_use_s.get(piece.tensor, self.forward_s) for piece in bucket.slices)


def median_times(times: Sequence[ModelTimes]) -> ModelTimes:
    """Several steps of one rank as one: the median of each figure."""
    return _combined(times, median)


def slowest_times(times: Sequence[ModelTimes]) -> ModelTimes:
    """Several ranks as one: a bucket is exchanged when the last rank has it, so the maximum."""
    return _combined(times, max)


def _combined(
    times: Sequence[ModelTimes], combine: Callable[[Sequence[float]], float]
) -> ModelTimes:
    def of_each(rows: Sequence[Mapping[int, float]]) -> dict[int, float]:
        indices = sorted({index for row in rows for index in row})
        return {index: combine([row[index] for row in rows if index in row]) for index in indices}

    return ModelTimes(
        forward_s=combine([one.forward_s for one in times]),
        backward_s=combine([one.backward_s for one in times]),
        first_use_s=of_each([one.first_use_s for one in times]),
        ready_s=of_each([one.ready_s for one in times]),
        step_s=combine([one.step_s for one in times]),
        late_step_s=combine([one.late_step_s for one in times]),
        allows_early=all(one.allows_early for one in times),
        allows_all_reduce=all(one.allows_all_reduce for one in times),
        allows_cuts=all(one.allows_cuts for one in times),
    )
