"""What plans for the comparison of early gathers may do is what they do."""

from __future__ import annotations

from lightning_dear.planning.predict import StepModel
from tests.net.early_plans import PlanWith
from tests.planning.test_all_reduce import LATE_TIMES, PLAN, TENSORS
from tests.planning.test_predict import LINK


def test_a_plan_does_what_it_may_and_nothing_else() -> None:
    model = StepModel(TENSORS, PLAN.world_size, LATE_TIMES, LINK)
    neither = PlanWith(is_early=False).best_plan(model)
    assert neither.early == neither.all_reduced == ()
    early = PlanWith().best_plan(model)
    assert early.all_reduced == ()
    assert early.early
    reduced = PlanWith(is_early=False, all_reduced_share=1).best_plan(model)
    assert reduced.early == ()
    assert model.step_s(reduced) <= model.step_s(neither)
