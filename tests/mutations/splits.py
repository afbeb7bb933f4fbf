"""What splitting batches by shares must not do without."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

CUTTING = "tests/callbacks/test_batch_split.py"
TRAINING = "tests/lightning/test_split.py"

SPLITS = [
    Mutation(
        "a sample for every rank",
        "callbacks:quickest",
        " or sizes[slow] == 1",
        "",
        (f"{CUTTING}::test_global_batches_are_cut_by_shares",),
    ),
    Mutation(
        "a number of batches that does not depend on the shares",
        "callbacks:cut",
        "each + (rank < rest)",
        "each + rest * (rank == 0)",
        (f"{CUTTING}::test_global_batches_are_cut_by_shares",),
    ),
    Mutation(
        "samples of a rank that is slow whatever its size",
        "callbacks:quickest",
        " or costs[slow][1] == 0",
        "",
        (f"{CUTTING}::test_equal_ranks_keep_their_sizes",),
    ),
    Mutation(
        "the same draws on all ranks",
        "SplitBatches.__iter__",
        "            torch.default_generator.manual_seed(self.whole.sampler.seed + epoch)\n",
        "",
        (f"{CUTTING}::test_a_sampler_that_lightning_wraps_draws_alike_on_all_ranks",),
    ),
    Mutation(
        "all samples, without padding",
        "callbacks:_order_of",
        "        own.num_replicas, own.rank = 1, 0\n",
        "",
        (f"{CUTTING}::test_what_has_an_order_of_its_own_keeps_it",),
    ),
    Mutation(
        "dropping the last batch",
        "BatchSplit.loader",
        "total, loader.drop_last)",
        "total, False)",
        (f"{CUTTING}::test_the_last_batch_is_cut_or_dropped",),
    ),
    Mutation(
        "new workers for a copied loader",
        "BatchSplit.loader",
        "        private_names.LOADER_ITERATOR.replace_in(own, None)\n",
        "",
        (f"{CUTTING}::test_workers_of_the_loader_that_was_passed_are_not_used",),
    ),
    Mutation(
        "loaders that do not train",
        "BatchSplit.loader",
        "        if not strategy.lightning_module.trainer.training:\n",
        "        if False:\n",
        (f"{CUTTING}::test_loaders_that_do_not_train_are_left_alone",),
    ),
    Mutation(
        "the same loader on all ranks",
        "BatchSplit.loader",
        " or facts != said[0]",
        "",
        (f"{CUTTING}::test_ranks_that_do_not_fit_are_refused_on_all",),
    ),
    Mutation(
        "weights of parts that differ in size",
        "PipelineStrategy._take_options",
        '        weights = given["weights"] or ("samples" if split is not None else None)\n',
        '        weights = given["weights"]\n',
        (f"{TRAINING}::test_shares_train_as_one_process_on_the_global_batches",),
    ),
    Mutation(
        "batches that are fetched already",
        "SplitBatches.__iter__",
        " or (epoch, number) < self.since",
        "",
        (f"{TRAINING}::test_new_sizes_count_from_what_no_worker_has_fetched",),
    ),
    Mutation(
        "batches that another rank has fetched",
        "BatchSplit._decide",
        "max(positions)",
        "self._batches.position",
        (f"{TRAINING}::test_new_sizes_count_from_what_no_worker_has_fetched",),
    ),
    Mutation(
        "measuring without waits",
        "Instruments.waiting",
        "                self.marks += start, end\n",
        "                pass\n",
        ("tests/telemetry/test_clock.py::test_a_list_of_marks_gets_those_of_waits",),
    ),
    Mutation(
        "measuring without what comes between batches",
        "BatchSplit.on_train_batch_end",
        "            instruments.marks = None\n",
        "",
        (f"{TRAINING}::test_waits_between_batches_are_not_measured",),
    ),
    Mutation(
        "batches that training has fetched, although user code iterates anew",
        "SplitBatches.__iter__",
        "max(self.position, (epoch, number + 1))",
        "(epoch, number + 1)",
        (f"{CUTTING}::test_a_second_iteration_does_not_forget_what_was_fetched",),
    ),
    Mutation(
        "equal sizes for equal ranks",
        "BatchSplit._decide",
        "        if gain < _LEAST_GAIN:\n",
        "        if False:\n",
        (f"{TRAINING}::test_sizes_that_gain_little_are_left_equal",),
    ),
    Mutation(
        "sizes in checkpoints",
        "BatchSplit.state_dict",
        '{"sizes": self._shares} if self._is_auto else {}',
        "{}",
        (f"{TRAINING}::test_sizes_are_saved_and_count_in_a_resumed_fit",),
    ),
    Mutation(
        "shares that are given, in spite of a checkpoint",
        "BatchSplit.load_state_dict",
        "        if self._is_auto:\n",
        "        if True:\n",
        (f"{TRAINING}::test_sizes_are_saved_and_count_in_a_resumed_fit",),
    ),
    Mutation(
        "sizes of a checkpoint with other batches",
        "BatchSplit.loader",
        "        if self._is_auto and (len(shares), sum(shares)) != (num_ranks, total):\n",
        "        if False:\n",
        (f"{TRAINING}::test_sizes_of_other_batches_are_measured_again",),
    ),
]
