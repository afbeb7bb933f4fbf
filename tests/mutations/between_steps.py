"""What an optimizer's state and parameters are between steps, and what pieces carry."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

CARRIED = "tests/optimizers/test_what_parameters_carry.py"
BETWEEN = "tests/engine/test_state_between_steps.py"

BETWEEN_STEPS = [
    Mutation(
        "reads of sharded state are refused",
        "ShardedOptimizer.check_read",
        "            self.refuse_read()\n",
        "            pass\n",
        (f"{BETWEEN}::test_reads_of_sharded_state_are_refused",),
    ),
    Mutation(
        "removed entries of optimizer.state are dropped from shards",
        "SteppedPieces.drop_removed",
        "(*gone, *removed)",
        "removed",
        (f"{BETWEEN}::test_what_is_reset_or_written_counts",),
    ),
    Mutation(
        "another dict in place of optimizer.state resets the shards",
        "SteppedPieces.drop_removed",
        "            self.shards.state.clear()\n",
        "            pass\n",
        (f"{BETWEEN}::test_what_is_reset_or_written_counts",),
    ),
    Mutation(
        "ranks compare what was written to optimizer.state",
        "SharedOptions._values",
        "{_STATE: self._stepper.written, ",
        '{_STATE: "", ',
        (f"{BETWEEN}::test_a_write_on_one_rank_alone_is_refused",),
    ),
    Mutation(
        "weights that a second method has written are gathered",
        "MeanGradient._gather",
        "            active.gatherer.launch(bucket.number)\n",
        "            pass\n",
        (f"{BETWEEN}::test_a_second_method_runs_on_shards",),
    ),
    Mutation(
        "own gradients forbid reads of whole state",
        "MeanGradient.before_state_access",
        "self.progress.state in _HAS_OWN_GRADIENTS",
        "False",
        (f"{BETWEEN}::test_with_gathered_gradients_reads_are_of_the_last_step",),
    ),
    Mutation(
        "pieces carry the attributes of their parameters",
        "SteppedPieces._swap",
        "        carry_attributes(self.pieces, self.shards.parameters)\n",
        "",
        (f"{CARRIED}::test_it_is_found_as_under_torch",),
    ),
    Mutation(
        "pieces have the names of their parameters",
        "put_into",
        "    if NAMES in group:\n",
        "    if False:\n",
        (f"{CARRIED}::test_it_is_found_as_under_torch",),
    ),
    Mutation(
        "a late step sees the attributes of its time",
        "DeferredStep._hide_newer",
        "if before.get(key, before) is not value",
        "if False",
        (f"{CARRIED}::test_it_is_found_as_under_torch",),
    ),
    Mutation(
        "an optimizer that looks parameters up is stepped whole",
        "_keeper",
        "            return name\n",
        "            return None\n",
        (f"{CARRIED}::test_what_cannot_be_carried_is_stepped_whole",),
    ),
    Mutation(
        "an option that is set later is tried",
        "TriedOptions.check",
        "        if new and ",
        "        if None and ",
        (f"{CARRIED}::test_an_option_that_is_set_later_is_tried_then",),
    ),
    Mutation(
        "an entry that is put in place of another drops it, also if it is empty",
        "StateBetweenSteps.__setitem__",
        '        self.removed.update({key} & self._note("put", key))\n',
        '        self._note("put", key)\n',
        (f"{BETWEEN}::test_what_is_reset_or_written_counts",),
    ),
    Mutation(
        "state that was removed at the end is not saved",
        "PlanLifecycle.take_over",
        "            self._stepper.drop_removed()\n",
        "            pass\n",
        (f"{BETWEEN}::test_what_is_removed_after_the_last_step_is_not_saved",),
    ),
    Mutation(
        "an optimizer that keeps attributes on parameters is stepped whole",
        "find_difference",
        "if on_parts and (made",
        "if False and (made",
        (f"{CARRIED}::test_what_cannot_be_carried_is_stepped_whole",),
    ),
]
