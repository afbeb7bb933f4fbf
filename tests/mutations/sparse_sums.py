"""What sparse all-reduces must not do without."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

TESTS = "tests/engine/test_oktopk.py"
BUCKET = "exchange/region_bucket.py"
SELECTION = "exchange/global_selection.py"

TO_THE_BIT = (f"{TESTS}::test_every_number_arrives_or_is_left_to_the_bit",)
RESCALED = ("tests/engine/test_lr_rescale.py::test_what_is_left_weighs_what_it_weighed",)
REFERENCE = (f"{TESTS}::test_bits_are_those_of_the_reference",)

SPARSE_SUMS = [
    Mutation(
        "places in ascending order, as a search among them needs",
        BUCKET,
        "        return torch.cat([part.places for part in parts]).long()\n",
        "        sizes = torch.cat([part.numbers for part in parts]).abs()\n"
        "        places = torch.cat([part.places for part in parts]).long()\n"
        "        return places[sizes.argsort(descending=True)]\n",
        TO_THE_BIT,
    ),
    Mutation(
        "putting back what was sent in vain",
        BUCKET,
        "            self.worker.put_back(one.places[is_lost], one.numbers[is_lost])\n",
        "            pass\n",
        TO_THE_BIT,
    ),
    Mutation(
        "taking what was sent out of the residual",
        BUCKET,
        "        waiting.index_fill_(0, whole.places, 0.0)\n",
        "",
        TO_THE_BIT,
    ),
    Mutation(
        "summing in the order of the ranks",
        "exchange/sparse_bucket.py",
        "        for source, row in enumerate(self.incoming):\n",
        "        for source, row in reversed(list(enumerate(self.incoming))):\n",
        REFERENCE,
    ),
    Mutation(
        "a cap on messages",
        BUCKET,
        "        sent = [part.largest(self.most_sent) for part in selected.cut(self.regions)]\n",
        "        sent = selected.cut(self.regions)\n",
        REFERENCE,
    ),
    Mutation(
        "a cap on what one owner keeps",
        BUCKET,
        "        return found.largest(self.most_owned), len(places)\n",
        "        return found, len(places)\n",
        REFERENCE,
    ),
    Mutation(
        "a cap on what all owners keep",
        SELECTION,
        "        return own.largest(len(own.places) * one.k // num_all)\n",
        "        return own\n",
        REFERENCE,
    ),
    Mutation(
        "the first of equal numbers",
        SELECTION,
        "            room -= sum(num_equal for _, num_equal in counts[:rank])\n",
        "",
        TO_THE_BIT,
    ),
    Mutation(
        "a threshold for the next step",
        "exchange/sparse_bucket.py",
        "        self.threshold.commit()\n",
        "",
        REFERENCE,
    ),
    Mutation(
        "regions for the next step",
        BUCKET,
        "        self.regions, self.global_threshold = self._next_regions, self._next_global\n",
        "        self.global_threshold = self._next_global\n",
        REFERENCE,
    ),
    Mutation(
        "asking once more for what an earlier round has rejected",
        "exchange/sparse.py",
        "        self.coded[bucket.number].restore_rejected()\n",
        "",
        (f"{TESTS}::test_gradients_of_several_backwards_add_up",),
    ),
    Mutation(
        "giving back what nobody steps",
        BUCKET,
        "                own.zero_()\n",
        "",
        (f"{TESTS}::test_nothing_is_lost_whatever_happens_in_between",),
    ),
    Mutation(
        "thresholds and regions in checkpoints",
        "checkpoint/residuals.py",
        "            one.steer(residuals.steering[parameters[_first(one)]])\n",
        "            pass\n",
        (f"{TESTS}::test_a_resumed_run_has_the_same_bits",),
    ),
    Mutation(
        "refusing a denser gradient than was selected",
        BUCKET,
        "        is_denser = bool(own.any())\n",
        "        is_denser = False\n",
        (f"{TESTS}::test_hooks_may_not_make_it_dense",),
    ),
    Mutation(
        "looking for inf in what is selected",
        "exchange/sparse.py",
        "            self._look_for_inf(not_empty(selected))\n",
        "            pass\n",
        (f"{TESTS}::test_gradients_that_are_not_finite_are_refused_and_leave_no_trace",),
    ),
    Mutation(
        "thresholds without a loss scale",
        SELECTION,
        "                one.note_threshold(thresholds[number] / self._scale)\n",
        "                one.note_threshold(thresholds[number])\n",
        (f"{TESTS}::test_a_loss_scale_changes_nothing",),
    ),
    Mutation(
        "clearing momentum where it has arrived",
        BUCKET,
        "            self.worker.note_arrived(one.places[~is_lost])\n",
        "",
        (f"{TESTS}::test_momentum_is_kept_until_it_arrives",),
    ),
    Mutation(
        "rescaling what is left before gradients are added to it",
        "plan_changes.py",
        "            self._residuals.follow_rates(self.complete_parameters)\n",
        "            pass\n",
        RESCALED,
    ),
    Mutation(
        "rescaling what is left before it is saved beside other learning rates",
        "saved_state.py",
        "        self._residuals.follow_rates(lambda: None)\n",
        "",
        RESCALED,
    ),
    Mutation(
        "rescaling what is held of frozen parameters",
        "residual_keeper.py",
        "            residual.mul_(changes.get(parameter, 1.0))\n",
        "            pass\n",
        RESCALED,
    ),
    Mutation(
        "noting the learning rates of the first step",
        "residual_keeper.py",
        "            self._put_in(self._held)\n        self.follow_rates(lambda: None)\n",
        "            self._put_in(self._held)\n",
        RESCALED,
    ),
    Mutation(
        "forgetting the learning rates of what was there before loading",
        "residual_keeper.py",
        "        self._follower.start_anew()\n",
        "",
        RESCALED,
    ),
]
