"""What is removed of training loaders that end on all ranks together."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

TESTS = "tests/lightning/test_loaders.py"
ENDS = "tests/engine/test_batches_ahead.py"
ALL = f"{TESTS}::test_all_ranks_end_together_with_the_weights_of_one_process"
BEHIND = f"{TESTS}::test_a_loader_goes_on_behind_the_batch_that_was_trained"

LOADERS = [
    Mutation(
        "weight 0 of a repeated batch",
        "BatchWeights._present",
        "0.0 if self.is_repeat and self._given is not None else self._given",
        "self._given",
        (f"{ALL}[sized-own1-options1-2]",),
    ),
    Mutation(
        "repeats left out of the means of an epoch",
        "Loaders._weigh_logged_values",
        "0 if is_left_out else ",
        "",
        (f"{ALL}[sized-own1-options1-2]",),
    ),
    Mutation(
        "batch sizes whose sum over ranks Lightning can divide",
        "Loaders._weigh_logged_values",
        " * self.strategy.world_size",
        "",
        (f"{ALL}[sized-own1-options1-3]",),
    ),
    Mutation(
        "means outside of batches after a repeat",
        "Loaders._weigh_logged_values",
        " and results.batch is not None",
        "",
        (f"{TESTS}::test_what_is_logged_at_the_end_of_an_epoch_counts",),
    ),
    Mutation(
        "batches of user code that are its own",
        "_Epoch.__next__",
        "taken is None or taken.iterators != [self]",
        "False",
        (f"{TESTS}::test_others_take_their_own_batches_and_no_rank_waits",),
    ),
    Mutation(
        "no batch fetched that a limit leaves for the next epoch",
        "_Epoch.__next__",
        "min(1 + self.lookahead, self._limit - self.given)",
        "1 + self.lookahead",
        (f"{TESTS}::test_no_batch_is_lost_between_epochs_of_limited_length",),
    ),
    Mutation(
        "the last batch, fetched again when training is resumed",
        "_Epoch.__init__",
        "next(self._own, None) if number else None",
        "None",
        (BEHIND,),
    ),
    Mutation(
        "the state of the batch that was trained, not of the one that is fetched",
        "_Epoch.state",
        "-2 - max(self.num_own - num_done, 0)",
        "-2",
        (BEHIND,),
    ),
    Mutation(
        "the batch whose training failed",
        "_Epoch.state",
        " - (progress.started > progress.processed)",
        "",
        (f"{TESTS}::test_a_batch_whose_training_failed_is_given_again",),
    ),
    Mutation(
        "an epoch that was saved at its end is over",
        "_Epoch.state",
        "-1 if is_over else num_done",
        "num_done",
        (BEHIND,),
    ),
    Mutation(
        "an epoch that a limit has ended is not over",
        "_Epoch.state",
        " and not is_limited",
        "",
        (f"{TESTS}::test_a_stream_goes_on_behind_the_limit_of_an_epoch",),
    ),
    Mutation(
        "refusing a rank without a batch",
        "numbers_of_ranks",
        "any(numbers) and 0 in numbers",
        "False",
        (f"{TESTS}::test_it_is_refused_on_all_ranks",),
    ),
    Mutation(
        "telling batches ahead in the flags of a round",
        "BatchesAhead.num_bytes",
        "int(self._end().lookahead > 0)",
        "0",
        (f"{TESTS}::test_no_batch_asks_where_rounds_tell",),
    ),
    Mutation(
        "telling batches ahead where ranks ask for signals",
        "StopRequest.ask_through",
        "                    training.end.hear(training.end.given, ahead)\n",
        "",
        (f"{TESTS}::test_no_batch_asks_where_rounds_tell",),
    ),
    Mutation(
        "what was told in the round before, with NCCL",
        "BatchesAhead.hear",
        "self._before if is_of_round_before else self._present",
        "self._present",
        (ENDS,),
    ),
    Mutation(
        "what was told in another epoch",
        "BatchesAhead.hear",
        "end.hear(given, ahead)",
        "self._end().hear(given, ahead)",
        (ENDS,),
    ),
    Mutation(
        "a known length",
        "SharedEnd.hear",
        "not self.is_final",
        "True",
        (ENDS,),
    ),
]
