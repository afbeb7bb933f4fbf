"""What is removed of averaging gradients that no optimizer holds."""

from __future__ import annotations

from tests.mutations.mutation import Mutation, row

TESTS = "tests/engine/test_other_optimizers.py"
SUMS = "test_sums_are_averaged_at_the_end_of_each_backward_that_is_not_blocked"
LATE = "test_ranks_stop_asking_and_hear_of_a_late_gradient_in_the_next_round"

UNHELD = [
    Mutation(
        "reducing buckets before gradients of no optimizer",
        "Pipeline.end_backward",
        "                part.mean.reduce()\n",
        "                pass\n",
        (f"{TESTS}::test_all_ranks_launch_in_one_order_where_one_lacks_a_gradient",),
    ),
    Mutation(
        "averaging gradients of no optimizer before hooks see them",
        "CompletionGuard.on_after_backward",
        "        self.end_backward()\n",
        "",
        row("an optimizer that configure_optimizers does not return, for parameters of its own"),
    ),
    Mutation(
        "averaging gradients of no optimizer after a backward",
        "Pipeline.backward",
        "        self.end_backward()\n",
        "",
        (f"{TESTS}::{SUMS}",),
    ),
    Mutation(
        "leaving gradients of no optimizer alone while they accumulate",
        "Pipeline.backward",
        "synchronize is not False and unheld",
        "unheld",
        (f"{TESTS}::{SUMS}",),
    ),
    Mutation(
        "agreeing which gradients of no optimizer there are",
        "UnheldGradients.average",
        "of_any_rank(self._own(), self._collectives)",
        "self._own()",
        (f"{TESTS}::test_a_gradient_of_some_ranks_is_averaged_and_one_of_none_stays_none",),
    ),
    Mutation(
        "asking no more for gradients of no optimizer",
        "UnheldGradients.average",
        "self.patience - 1",
        "self.patience",
        (f"{TESTS}::{LATE}",),
    ),
    Mutation(
        "averaging a gradient of no optimizer as soon as ranks hear of it",
        "UnheldGradients._hear",
        "            self.average()\n",
        "            pass\n",
        (f"{TESTS}::{LATE}",),
    ),
    Mutation(
        "refusing to step a gradient that waits to be averaged",
        "Training.refuse_stranger",
        "        self.unheld.check(stepped)\n",
        "",
        (f"{TESTS}::{LATE}",),
    ),
    Mutation(
        "refusing ranks that freeze others of the parameters that no optimizer holds",
        "check_layout",
        "    described += [",
        "    [",
        (f"{TESTS}::test_ranks_that_freeze_others_are_refused",),
    ),
    Mutation(
        "asking for no gradients of frozen parameters",
        "UnheldGradients.begin",
        "PATIENCE if any(one.requires_grad for _, one in self._named) else 0",
        "PATIENCE",
        (f"{TESTS}::test_frozen_ones_cost_nothing_and_are_averaged_once_they_train",),
    ),
]
