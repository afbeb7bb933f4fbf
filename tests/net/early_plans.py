"""Plans with and without early gathers and all-reduced buckets, for `dear-bench` entries.

As root, in the repository:

    F="strategy: dear, tuning_steps: 10, fusion: mergecomp"
    F="$F, fusion._target_: tests.net.early_plans.PlanWith"
    for hosts in 2 4; do for ratio in 1 1.33; do
      PYTHONPATH=. dear-bench cluster=emulated cluster.rate_mbit=100 cluster.num_hosts=$hosts \\
        ratio=$ratio model.profile=bert_base model.scale=64 optimizer=sgd_plain \\
        rounds=4 steps=4 warm_up_steps=3 "entries=[dear, \\
          {name: neither, $F, +fusion.is_early: false}, {name: early, $F}, \\
          {name: reduced_tenth, $F, +fusion.is_early: false, +fusion.all_reduced_share: 0.1}, \\
          {name: reduced, $F, +fusion.is_early: false, +fusion.all_reduced_share: 1}, \\
          {name: both_tenth, $F, +fusion.all_reduced_share: 0.1}, \\
          {name: both, $F, +fusion.all_reduced_share: 1}]"
    done; done

Measured on 2 cores (AMD EPYC, shared), torch 2.13.0; steps over those of `dear`:

    communication / computing   1       1       1.33    1.33
    ranks                       2       4       2       4
    neither                     -0.8 %  -1.2 %  -1.5 %  0.0 %
    early                       -8.1 %  -3.8 %  -2.1 %  +0.8 %
    reduced_tenth               -0.5 %  -0.5 %  -1.7 %  +0.6 %
    reduced                     -4.4 %  -1.1 %  -1.1 %  +0.9 %
    both_tenth                  +0.3 %  -4.8 %  -2.1 %  +1.3 %
    both                        -7.3 %  -5.5 %  -2.0 %  0.0 %

`both_tenth` chose 206 buckets with 2 ranks at a ratio of 1, 96 of them early, which took more of
the processor than was predicted. `fusion="auto"` measures such a plan and drops it.
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
