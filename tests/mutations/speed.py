"""Mutations of what makes steps short: plans that change, and what is measured for them."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

REPLAN = "tests/engine/test_replan.py"

SPEED = [
    Mutation(
        "taking state over from one plan to the next",
        "PlanLifecycle._activate",
        "        if left is not None and self._hand_on(left):\n",
        "        if False:\n",
        (f"{REPLAN}::test_a_new_plan_in_mid_run_is_bit_equal_to_the_last_plan_from_the_start",),
    ),
    Mutation(
        "refusing a plan that ranks do not share",
        "Recording.check",
        "    if any(other != plan for other in collectives.all_gather_object(plan)):",
        "    if False:",
        (f"{REPLAN}::test_a_plan_that_does_not_fit_is_refused_before_anything_changes",),
    ),
    Mutation(
        "checking the first plan",
        "PlanLifecycle.start",
        "else found\n        self.recording.check(plan, collectives)\n",
        "else found\n",
        (f"{REPLAN}::test_a_first_plan_is_checked_too",),
    ),
    Mutation(
        "no plan between two recordings",
        "PlanLifecycle.dissolve",
        "        self.plan = None\n",
        "",
        (
            f"{REPLAN}::test_state_saved_between_unfreezing_and_the_next_step_is_of_the_right"
            "_parameters",
        ),
    ),
    Mutation(
        "the link's rate from a long train",
        "measure_collectives",
        "    long_bytes = min(max(model_bytes // 2, total_bytes), _MOST_LONG_BYTES)\n",
        "    long_bytes = total_bytes\n",
        ("tests/tuning/test_tuning.py::test_uneven_ends_of_trains_hardly_count",),
    ),
    Mutation(
        "one exchange of each kind before a train",
        "train_times",
        "            launch(0).wait()\n",
        "            pass\n",
        (
            "tests/tuning/test_tuning.py::test_trains_have_limits_and_do_not_count_what_a_size_sets_up",
        ),
    ),
]
