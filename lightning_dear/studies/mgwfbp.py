"""MG-WFBP as published: DDP's all-reduces, in the buckets that its rule makes."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_dear.planning import BucketPlan, MGWFBPFusion, PlanSearch
from lightning_dear.planning.predict import StepModel
from lightning_dear.planning.search import NoContest, described

_BYTES_PER_ELEMENT = 4
_MIB = 1 << 20


class AllReduceMGWFBP(MGWFBPFusion):
    """The rule with the cost of an all-reduce, as measured, which sends twice the bytes.

    Finds its plan under `strategy="dear"`, which measures the times that the rule needs; see
    `ddp_options`.
    """

    @override
    def search_for(self, model: StepModel) -> PlanSearch:
        cost = model.link.all_reduce or replace(model.link, alpha_s=2 * model.link.alpha_s)
        plan = self.best_plan(replace(model, link=replace(cost, beta_s=2 * cost.beta_s)))
        return NoContest(plan, f"mgwfbp, for all-reduces: {described(plan)}")


def ddp_options(plan: BucketPlan) -> dict[str, Any]:
    """Return the options under which DDP makes the buckets of `plan`, for fp32 models.

    Raises:
        ValueError: If this version of torch has no list of caps.
    """
    if "bucket_cap_mb_list" not in inspect.signature(DistributedDataParallel).parameters:
        raise ValueError(
            "MG-WFBP on DDP needs DistributedDataParallel(bucket_cap_mb_list=), which came with"
            " torch 2.13; update torch, or leave the entry out."
        )
    sizes = [plan.buckets[number].numel * _BYTES_PER_ELEMENT for number in plan.reduce_order]
    return {"bucket_cap_mb_list": [size / _MIB for size in sizes]}
