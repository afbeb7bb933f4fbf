"""What random numbers of codecs must not do without."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

TESTS = "tests/exchange/test_seeds.py"

SEEDS = [
    Mutation(
        "the user's seed in what codecs draw, and in the factor that powersgd starts from",
        "CompressedBucket._seed_of",
        'key if self.seed == NO_SEED else f"{self.seed} {key}"',
        "key",
        (f"{TESTS}::test_another_seed_draws_other_numbers",),
    ),
    Mutation(
        "rank 0's seed on all ranks",
        "Recording.agreed",
        "recorder.ungated, codecs, seed)\n",
        "recorder.ungated, codecs, torch.initial_seed())\n",
        (f"{TESTS}::test_rank_0s_seed_counts",),
    ),
    Mutation(
        "the seed that a checkpoint has",
        "ResidualKeeper._overwrite",
        "            bucket.start_anew(own.seed)\n",
        "            bucket.start_anew(None)\n",
        (f"{TESTS}::test_a_resumed_run_keeps_the_seed",),
    ),
    Mutation(
        "the seed in a checkpoint's folder",
        "checkpoint.residuals:sharded",
        '"seed": whole.seed, ',
        '"seed": 0, ',
        (f"{TESTS}::test_a_resumed_run_keeps_the_seed",),
    ),
    Mutation(
        "the seed in use, whatever the process is seeded with later",
        "ResidualKeeper.attach",
        "        self._seed = seed if self._seed is None else self._seed\n",
        "        self._seed = seed\n",
        (f"{TESTS}::test_the_seed_stays_whatever_is_drawn_from_meanwhile",),
    ),
    Mutation(
        "the seed that was loaded, in later plans",
        "ResidualKeeper.put_in",
        "        self._seed = self._seed if held.seed is None else held.seed\n",
        "",
        (f"{TESTS}::test_a_loaded_seed_stays_in_use",),
    ),
    Mutation(
        "no seed where training began without one",
        "checkpoint:unpacked",
        'state.get("seed", NO_SEED))',
        'state.get("seed"))',
        (f"{TESTS}::test_a_state_of_earlier_versions_goes_on_without_a_seed",),
    ),
]
