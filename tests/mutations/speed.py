"""Mutations of what makes steps short: plans that change, early gathers, posted receives."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

EARLY = "tests/engine/test_early_steps.py"
REPLAN = "tests/engine/test_replan.py"
ARMED = "tests/lightning/test_early_steps.py"

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
        "a landing of its own for an early bucket",
        "bucket:_bucket",
        "    landing = torch.empty_like(parameters) if role.is_staged else parameters\n",
        "    landing = parameters\n",
        (f"{EARLY}::test_a_backward_in_progress_still_reads_the_old_weights",),
    ),
    Mutation(
        "taking over what was written before an early step",
        "OptimizerPipeline._step_early",
        "            active.flat.buckets[number].adopt_writes()\n",
        "",
        (f"{EARLY}::test_writes_between_steps_reach_early_buckets",),
    ),
    Mutation(
        "leaving what was stepped early out of the step",
        "ShardedOptimizer.begin_step",
        " if number not in self.stepped_early]",
        "]",
        (f"{EARLY}::test_early_steps_change_no_bit",),
    ),
    Mutation(
        "refusing a gradient for what has been stepped",
        "MeanGradient.finish_rounds",
        "            self._check_none_came_after_its_step(active)\n",
        "            pass\n",
        (f"{EARLY}::test_a_second_backward_for_what_has_been_stepped_is_refused_on_all_ranks",),
    ),
    Mutation(
        "no checkpoint of a half-stepped state",
        "OptimizerPipeline.prepare_state",
        "        if self.stepper.stepped_early or",
        "        if",
        (f"{ARMED}::test_a_checkpoint_of_a_half_stepped_state_is_refused",),
    ),
    Mutation(
        "nothing early where gradients are looked at",
        "why_not_early",
        "    return next((reason for reason, holds in reasons.items() if holds), None)\n",
        "    return None\n",
        (f"{ARMED}::test_nothing_is_stepped_early_where_gradients_are_looked_at",),
    ),
    Mutation(
        "early gathers only where the link would stand still",
        "planning.refine:fitting",
        "        while free_s < launched_s:\n",
        "        while True:\n",
        ("tests/planning/test_predict.py::test_early_gathers_are_spread_over_the_model",),
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
