"""Plans as files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from lightning_dear.planning.plan import BucketPlan, TensorSpec


def save_plan(path: str | Path, plan: BucketPlan, tensors: Sequence[TensorSpec]) -> None:
    """Writes `plan`, which is over `tensors`, as JSON that `FixedPlan` reads."""
    Path(path).write_text(json.dumps(plan.to_dict(tensors)) + "\n")


class FixedPlan:
    """A plan that was made before, for the same model on the same number of ranks.

    Args:
        path_or_plan: File of `save_plan`, read when training has recorded its first step, on every
            rank; or the plan itself.
    """

    def __init__(self, path_or_plan: str | Path | BucketPlan) -> None:
        self.path_or_plan = path_or_plan

    def plan(self, tensors: Sequence[TensorSpec], world_size: int) -> BucketPlan:
        """See `FusionPlanner`.

        Raises:
            ValueError: If the plan is for another model or another number of ranks.
            OSError: If the file cannot be read.
        """
        if isinstance(self.path_or_plan, BucketPlan):
            data = self.path_or_plan.to_dict(tensors)
            return BucketPlan.from_dict(data, tensors, world_size)
        path = Path(self.path_or_plan)
        try:
            data = json.loads(path.read_text())
            return BucketPlan.from_dict(data, tensors, world_size)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
