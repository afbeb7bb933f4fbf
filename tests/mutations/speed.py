"""Mutations of what makes steps short: plans that change, and what is measured for them."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

LATE = "tests/callbacks/test_late_rank.py"
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
        "else found\n        recording.check(plan, collectives)\n",
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
    Mutation(
        "exchanging figures only if all ranks do",
        "append_callbacks",
        "        one.is_on_all_ranks = are_alike and len(everyones) > 1\n",
        "        one.is_on_all_ranks = len(everyones) > 1\n",
        (f"{LATE}::test_callbacks_that_differ_between_ranks_exchange_nothing",),
    ),
    Mutation(
        "the timeline's exchange only if all ranks do",
        "TimelineCallback._write",
        "if self.is_on_all_ranks else ",
        "if True else ",
        (f"{LATE}::test_ranks_do_not_wait_for_a_rank_without_the_callbacks",),
    ),
    Mutation(
        "no late rank without enough to tell",
        "latest_rank",
        "max(LATE_SHARE * max(steps_s), 2 * max(errors_s))",
        "LATE_SHARE * max(steps_s)",
        (f"{LATE}::test_the_rank_that_waits_least_is_late",),
    ),
    Mutation(
        "late ranks by the epoch",
        "DearMonitor.on_train_epoch_end",
        "        self._num_compared = max(self._num_compared, len(waits_s))\n",
        "",
        (f"{LATE}::test_an_epoch_counts_without_its_stalls_and_warm_up",),
    ),
]
