"""Plans with and without early gathers and all-reduced buckets, for `dear-bench` entries.

entries=[dear,{name: neither, strategy: dear, tuning_steps: 10, fusion: mergecomp,
    fusion._target_: tests.net.early_plans.PlanWith, +fusion.is_early: false}]
"""

from __future__ import annotations

from dataclasses import replace

from typing_extensions import override

from lightning_dear.planning import BucketPlan, MergeCompFusion
from lightning_dear.planning.predict import StepModel
from lightning_dear.planning.refine import choose_all_reduce


class PlanWith(MergeCompFusion):
    """The plan that is predicted fastest of those that may do what is allowed here.

    Args:
        is_early: Whether buckets may be gathered while backward runs.
        all_reduced_share: Most of all elements that may be all-reduced, 0..1.
    """

    def __init__(
        self, *, max_pieces: int = 128, is_early: bool = True, all_reduced_share: float = 0.0
    ) -> None:
        super().__init__(max_pieces=max_pieces)
        self.is_early = is_early
        self.all_reduced_share = all_reduced_share

    @override
    def best_plan(self, model: StepModel) -> BucketPlan:
        times = replace(model.times, allows_early=self.is_early)
        allowed = StepModel(model.tensors, model.world_size, times, model.link)
        best = super().best_plan(allowed)
        if not self.all_reduced_share:
            return best
        share = self.all_reduced_share
        reduced = choose_all_reduce(best, allowed.tensors, times, allowed.link, share)
        return min(best, reduced, key=allowed.step_s)
