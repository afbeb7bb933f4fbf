"""What sparse all-reduces must not do without."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

TESTS = "tests/exchange/test_oktopk.py"
PARTS = "tests/exchange/test_sparse_parts.py"
STEPS = "tests/exchange/test_oktopk_steps.py"
SUMS = "tests/exchange/test_sparse_all_reduces.py"
FIGURES = "tests/exchange/test_sparse_figures.py"

TO_THE_BIT = (f"{TESTS}::test_every_number_arrives_or_is_left_to_the_bit",)
REFERENCE = (f"{TESTS}::test_bits_are_those_of_the_reference",)

SPARSE_SUMS = [
    Mutation(
        "knowing what has arrived without a search among places in the order of their numbers",
        "RegionBucket.arrive",
        "has_arrived = (gradients.index_select(0, own.places) != 0) & (own.numbers != 0)\n",
        "by_size = selected[gradients[selected].abs().argsort(descending=True)]\n"
        "                at = torch.searchsorted(by_size, own.places)\n"
        "                at.clamp_(max=len(by_size) - 1)\n"
        "                has_arrived = by_size[at] == own.places\n",
        TO_THE_BIT,
    ),
    Mutation(
        "putting back what was sent in vain",
        "Unsent.settle",
        '        self._now["residual"].scatter_add_(0, sent.places, lost)\n',
        "        pass\n",
        TO_THE_BIT,
    ),
    Mutation(
        "not putting back what has arrived",
        "Unsent.settle",
        "sent.numbers.masked_fill(has_arrived, 0.0)",
        "sent.numbers",
        TO_THE_BIT,
    ),
    Mutation(
        "taking out what is sent",
        "RegionBucket.pack",
        "        waiting.index_fill_(0, sent.places, 0.0)\n",
        "",
        TO_THE_BIT,
    ),
    Mutation(
        "taking out what is sent, where sums travel as they are",
        "RegionBucket.pack",
        "        waiting.index_fill_(0, sent.places, 0.0)\n",
        "",
        (f"{SUMS}::test_every_number_arrives_or_is_left_to_the_bit",),
    ),
    Mutation(
        "taking out what is sent to all ranks",
        "SparseBucket.pack",
        "        waiting.index_fill_(0, selected.places, 0.0)\n",
        "",
        (f"{SUMS}::test_every_number_arrives_or_is_left_to_the_bit",),
    ),
    Mutation(
        "telling a number that is 0 from one that was not selected",
        "RegionBucket.write",
        "        self._has_zeros = bool((numbers == 0).any())\n",
        "        self._has_zeros = False\n",
        (f"{STEPS}::test_what_a_hook_makes_zero_has_arrived_all_the_same",),
    ),
    Mutation(
        "refusing to add to gradients that were shown and taken back",
        "MeanGradient.reduce",
        "            self.progress.enter(StepState.CHANGED)\n",
        "            self.progress.enter(StepState.REDUCED)\n",
        (f"{SUMS}::test_nothing_is_added_to_what_was_changed",),
    ),
    Mutation(
        "refusing to add to gradients that were clipped",
        "MeanGradient.on_shards",
        "            self.progress.enter(StepState.CHANGED)\n",
        "            pass\n",
        (f"{SUMS}::test_nothing_is_added_to_what_was_changed",),
    ),
    Mutation(
        "regions of the step under way, whatever is loaded meanwhile",
        "RegionBucket._sums",
        "        own = self.bucket.mean[self.region]\n",
        "        self.region = slice(self.regions[self._rank], self.regions[self._rank + 1])\n"
        "        own = self.bucket.mean[self.region]\n",
        ("tests/exchange/test_oktopk_resumed.py::test_a_load_leaves_what_is_under_way_alone",),
    ),
    Mutation(
        "a tail as heavy as it is",
        "corrected",
        "    slope = float(sizes.log().mean()) - math.log(threshold)\n",
        "    slope = 0.1\n",
        REFERENCE,
    ),
    Mutation(
        "summing in the order of the ranks",
        "SparseBucket.sum_up",
        "        for row in self.incoming:\n",
        "        for row in self.incoming.flip(0):\n",
        REFERENCE,
    ),
    Mutation(
        "a cap on messages",
        "RegionBucket.pack",
        "[part.largest(self.selection.most_sent) for part in selected.cut(self.regions)]\n",
        "selected.cut(self.regions)\n",
        REFERENCE,
    ),
    Mutation(
        "a cap on what one owner keeps",
        "RegionBucket.choose",
        "            return self._sums().largest(self.selection.most_owned)\n",
        "            return self._sums()\n",
        REFERENCE,
    ),
    Mutation(
        "a cap on what all owners keep",
        "RegionBucket.choose",
        "        self.keep(found.largest(quota), scale, num_reached)\n",
        "        self.keep(found, scale, num_reached)\n",
        REFERENCE,
    ),
    Mutation(
        "the first of equal numbers",
        "largest_of_all",
        " - told[:, : collectives.world.rank, 1].sum(1)\n",
        "\n",
        TO_THE_BIT,
    ),
    Mutation(
        "a threshold for the next step",
        "SparseBucket.commit",
        "        self.threshold.commit()\n",
        "",
        REFERENCE,
    ),
    Mutation(
        "regions for the next step",
        "RegionBucket._hear",
        "            self.regions = regions\n",
        "            pass\n",
        REFERENCE,
    ),
    Mutation(
        "asking once more for what an earlier round has rejected",
        "SparseExchange.add_earlier",
        "        self.coded[bucket.number].restore()\n",
        "",
        (f"{TESTS}::test_gradients_of_several_backwards_add_up",),
    ),
    Mutation(
        "setting aside what nobody uses",
        "SparseBucket.note_used",
        "                own.zero_()\n",
        "",
        (f"{SUMS}::test_what_nobody_used_at_first_is_not_lost",),
    ),
    Mutation(
        "keeping what nobody steps, where sums travel as they are",
        "SparseBucket.commit",
        "            self.worker.keep(self._unused)\n",
        "            pass\n",
        (
            f"{SUMS}::test_what_nobody_uses_is_not_lost_where_sums_travel_as_they_are",
            f"{TESTS}::test_momentum_of_what_nobody_uses_waits",
        ),
    ),
    Mutation(
        "not putting back what was kept",
        "SparseBucket.take_sent",
        "                entries.numbers.masked_fill_(is_unused, 0.0)\n",
        "                pass\n",
        (f"{TESTS}::test_momentum_of_what_nobody_uses_waits",),
    ),
    Mutation(
        "each bucket's own count of sparse steps in checkpoints",
        "SparseBucket.steer",
        '        self.counts["reduce"] = int(count)\n',
        "",
        (
            "tests/exchange/test_oktopk_resumed.py"
            "::test_a_resumed_run_has_the_same_bits_with_buckets_that_are_sparse_since_other_steps",
        ),
    ),
    Mutation(
        "finding what is nan",
        "all_above",
        "        np.logical_not(np.less_equal(size, floor, out=own), out=own)\n",
        "        np.greater(size, floor, out=own)\n",
        ("tests/compression/test_thresholds.py::test_places_above_a_floor",),
    ),
    Mutation(
        "keeping what a round without gradients has sent",
        "SparseExchange.add_earlier",
        "        self.coded[bucket.number].restore()\n",
        "        if earlier is not None:\n            self.coded[bucket.number].restore()\n",
        (f"{SUMS}::test_what_a_round_without_gradients_sends_is_not_lost",),
    ),
    Mutation(
        "thresholds and regions in checkpoints",
        "ResidualKeeper._overwrite",
        "                bucket.steer(steering)\n",
        "                pass\n",
        ("tests/exchange/test_oktopk_resumed.py::test_a_resumed_run_has_the_same_bits",),
    ),
    Mutation(
        "refusing a denser gradient than was selected",
        "RegionBucket.take_back",
        "        is_denser = own.index_fill_(0, places, 0.0).any()\n",
        "        is_denser = torch.zeros((), dtype=torch.bool)\n",
        (f"{STEPS}::test_hooks_may_not_make_it_dense",),
    ),
    Mutation(
        "looking for inf in what is selected",
        "WholeSparseExchange._encode",
        "            self._look_for_inf(selected.numbers)\n",
        "            pass\n",
        (f"{STEPS}::test_gradients_that_are_not_finite_are_refused_and_leave_no_trace",),
    ),
    Mutation(
        "thresholds without a loss scale",
        "RegionBucket.keep",
        "        smallest = float(chosen.numbers.abs().min()) / scale if count else 0.0\n",
        "        smallest = float(chosen.numbers.abs().min()) if count else 0.0\n",
        (f"{TESTS}::test_a_loss_scale_changes_nothing",),
    ),
    Mutation(
        "clearing momentum where it has arrived",
        "UnsentVelocity.settle",
        "        momentum.scatter_add_(0, sent.places, lost)\n",
        "        pass\n",
        (f"{TESTS}::test_momentum_is_kept_until_it_arrives",),
    ),
    Mutation(
        "leaving what a static message has no room for",
        "StaticBucket.pack",
        "        is_sent = (order < room) & (numbers != 0)\n",
        "        is_sent = numbers != 0\n        order = order.clamp(max=room - 1)\n",
        TO_THE_BIT,
    ),
    Mutation(
        "telling a place from one where nothing was sent",
        "Entries.are_among",
        "[self.places] & (self.numbers != 0)\n",
        "[self.places]\n",
        (f"{PARTS}::test_what_was_not_sent_has_not_arrived",),
    ),
    Mutation(
        "a chosen 0 of a static selection is no number",
        "StaticBucket.message",
        "        places = self.chosen.masked_fill(self._is_empty, self.spec.padded_numel)\n",
        "        places = self.chosen\n",
        TO_THE_BIT,
    ),
    Mutation(
        "a number of a static selection that a hook has made 0",
        "StaticBucket.message",
        "        places = self.chosen.masked_fill(self._is_empty, self.spec.padded_numel)\n",
        "        places = self.chosen.masked_fill(numbers == 0, self.spec.padded_numel)\n",
        (
            "tests/exchange/test_oktopk_steps.py::test_what_a_hook_makes_zero_has_arrived_all_the_same",
        ),
    ),
    Mutation(
        "leaving out a step whose nan a hook has spread",
        "SparseExchange.look_again",
        "        if flags[1] and not flags[0]:\n",
        "        if flags[1]:\n",
        ("tests/exchange/test_oktopk_static.py",),
    ),
    Mutation(
        "another round of what a selection has left out",
        "SparseBucket._leave",
        "        self._left_out.append((self.region, own.index_fill(0, places, 0.0)))\n",
        "",
        (f"{TESTS}::test_gradients_of_several_backwards_add_up",),
    ),
    Mutation(
        "regions of the selections, in static mode",
        "StaticBucket.commit",
        "        self.edges = self._next_edges\n",
        "",
        REFERENCE,
    ),
]
