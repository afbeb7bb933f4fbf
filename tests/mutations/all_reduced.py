"""What all-reduced buckets, and those who plan them, must not do without."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

ENGINE = "tests/engine/test_all_reduced.py"
LIFE = "tests/engine/test_all_reduced_life.py"
PLANNING = "tests/planning/test_all_reduce.py"
AUTO = "tests/planning/test_auto.py"

ALL_REDUCED = [
    Mutation(
        "counting an all-reduced gradient's norm once",
        "ActivePlan.global_norm",
        "            and (not piece.role.is_all_reduced or ",
        "        and (True or ",
        (f"{ENGINE}::test_between_backward_and_step_it_is_as_with_shards",),
    ),
    Mutation(
        "refusing old activations after a step that gathers nothing",
        "ShardedOptimizer._note_stepped",
        "torch.autograd.graph.increment_version(changed)\n",
        "pass\n",
        (f"{ENGINE}::test_a_backward_through_values_from_before_a_step_is_refused",),
    ),
    Mutation(
        "all-reducing 16-bit gradients in fp32",
        "exchange:Exchange.launch_reduce",
        "                bucket.mean.copy_(bucket.gradients)\n",
        "                pass\n",
        (f"{ENGINE}::test_new_plans_with_more_and_fewer_of_them_change_no_bit",),
    ),
    Mutation(
        "gathering nothing of an all-reduced bucket",
        "exchange:Exchange._gather",
        "-> Work:\n        if bucket.role.is_all_reduced:\n            return Work.done()\n"
        "        work = self.collectives.launch_all_gather(self._gathered(bucket)",
        "-> Work:\n        work = self.collectives.launch_all_gather(self._gathered(bucket)",
        (f"{ENGINE}::test_nothing_of_them_is_gathered_or_scattered",),
    ),
    Mutation(
        "stepping the whole of an all-reduced bucket",
        "shard_pieces",
        "own, pieces = bucket.own, []",
        "own, pieces = shard_slice(bucket.spec.padded_numel, 0, 2), []",
        (f"{ENGINE}::test_two_ranks_have_the_bits_of_ddp",),
    ),
    Mutation(
        "leaving out all-reduces that are refused",
        "PlanLifecycle._without_refused",
        "        refusal = self._training.all_reduce_refusal\n",
        "        refusal = None\n",
        (f"{LIFE}::test_where_they_are_refused_people_are_told",),
    ),
    Mutation(
        "planning for steps of whole buckets",
        "PlannedStep.stepped",
        "self._per_byte_s * whole_bytes * self.plan.world_size)]\n",
        "self._per_byte_s * whole_bytes)]\n",
        (f"{PLANNING}::test_a_step_by_hand",),
    ),
    Mutation(
        "keeping to the share of all-reduced elements",
        "planning.refine:_affordable",
        "        if used + numel[number] <= budget:\n",
        "        if used <= budget:\n",
        (f"{PLANNING}::test_the_share_is_kept_to",),
    ),
    Mutation(
        "measuring all-reduces beside the same plan without",
        "AutoFusion.search_for",
        "            candidates = [*candidates[:1], *pairs, *candidates[1:]]\n",
        "            candidates = [*candidates, *pairs[:0]]\n",
        (f"{AUTO}::test_what_should_be_faster_all_reduced_is_measured_beside_the_same_without",),
    ),
    Mutation(
        "measuring the backend's own all-reduce",
        "measure_collectives",
        "    return replace(fitted(**halves), all_reduce=fitted(**all_reduces))\n",
        "    return fitted(**halves)\n",
        (
            "tests/tuning/test_tuning.py::test_steps_after_a_change_are_dropped_and_a_pause_does_not_count",
        ),
    ),
    Mutation(
        "objects exchanged apart from all-reduces",
        "new_collectives",
        "(*groups, groups[1])[:3]",
        "(*groups, groups[0])[:3]",
        (f"{LIFE}::test_state_is_saved_after_a_backward_that_ranks_broke_off_at_different_layers",),
    ),
    Mutation(
        "a group of gloo's for objects beside NCCL's",
        "_process_groups",
        'dist.new_group(timeout=timeout, backend="gloo")',
        "groups[0]",
        (
            "tests/collectives/test_collectives.py"
            "::test_beside_groups_of_another_backend_objects_have_one_of_gloos",
        ),
    ),
    Mutation(
        "leaving alone at one rank what was not stepped",
        "ShardedOptimizer._note_stepped",
        "for piece in stepped]\n                torch",
        "for piece in pieces]\n                torch",
        (f"{LIFE}::test_at_one_rank_what_was_not_stepped_may_be_used_as_under_plain_torch",),
    ),
]
