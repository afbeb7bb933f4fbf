"""What all-reduced buckets, and those who plan them, must not do without."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

ENGINE = "tests/engine/test_all_reduced.py"
PLANNING = "tests/planning/test_all_reduce.py"
AUTO = "tests/planning/test_auto.py"

ALL_REDUCED = [
    Mutation(
        "counting an all-reduced gradient's norm once",
        "mean_gradients.py",
        "            and (not piece.is_all_reduced or ",
        "            and (True or ",
        (f"{ENGINE}::test_between_backward_and_step_it_is_as_with_shards",),
    ),
    Mutation(
        "refusing old activations after a step that gathers nothing",
        "gatherer.py",
        "        else:\n            self._bump_versions(number)\n",
        "",
        (f"{ENGINE}::test_a_backward_through_values_from_before_a_step_is_refused",),
    ),
    Mutation(
        "all-reducing 16-bit gradients in fp32",
        "exchange/dense.py",
        "                bucket.mean.copy_(bucket.gradients)\n",
        "                pass\n",
        (f"{ENGINE}::test_new_plans_with_more_and_fewer_of_them_change_no_bit",),
    ),
    Mutation(
        "gathering nothing of an all-reduced bucket",
        "exchange/dense.py",
        "        bucket.publish()\n        if bucket.is_all_reduced:\n",
        "        bucket.publish()\n        if False:\n",
        (f"{ENGINE}::test_nothing_of_them_is_gathered_or_scattered",),
    ),
    Mutation(
        "stepping the whole of an all-reduced bucket",
        "bucket.py",
        "    if bucket.is_all_reduced:\n        own = slice(0, bucket.spec.padded_numel)\n",
        "",
        (f"{ENGINE}::test_two_ranks_have_the_bits_of_ddp",),
    ),
    Mutation(
        "leaving out all-reduces that are refused",
        "plan_changes.py",
        "all_reduced=plan.all_reduced if self.all_reduce_refusal is None else ()",
        "all_reduced=plan.all_reduced",
        (f"{ENGINE}::test_where_they_are_refused_people_are_told",),
    ),
    Mutation(
        "planning for steps of whole buckets",
        "planning/predict.py",
        "    stepped_s += per_byte_s * whole_bytes * plan.world_size\n",
        "    stepped_s += per_byte_s * whole_bytes\n",
        (f"{PLANNING}::test_a_step_by_hand",),
    ),
    Mutation(
        "keeping to the share of all-reduced elements",
        "planning/all_reduce.py",
        "        if used + numel[number] <= budget:\n",
        "        if used <= budget:\n",
        (f"{PLANNING}::test_the_share_is_kept_to",),
    ),
    Mutation(
        "measuring all-reduces beside the same plan without",
        "planning/auto.py",
        "            pairs = [plan for pair in without.items() for plan in pair]\n",
        "            pairs = list(without)[:0]\n",
        (f"{AUTO}::test_what_should_be_faster_all_reduced_is_measured_beside_the_same_without",),
    ),
    Mutation(
        "measuring the backend's own all-reduce",
        "tuning.py",
        "    return replace(fitted(small, small_s, large, large_s), all_reduce=all_reduce)\n",
        "    return fitted(small, small_s, large, large_s)\n",
        ("tests/test_tuning.py::test_steps_after_a_change_are_dropped_and_a_pause_does_not_count",),
    ),
]
