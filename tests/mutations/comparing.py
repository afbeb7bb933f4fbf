"""What comparisons must not do without: of steps, and of how trainings end."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

RULES = "tests/studies/test_convergence.py"
ROUNDS = "tests/studies/test_summary.py"
CONFIG = "tests/apps/test_converge.py"
KEY = f"{CONFIG}::test_a_key_knows_all_that_has_a_say_and_nothing_else"

COMPARING = [
    Mutation(
        "every second pass backwards",
        "in_turn",
        "    return order[::-1] if is_backwards else order\n",
        "    return order\n",
        (f"{ROUNDS}::test_each_entry_is_first_and_follows_each_other_equally_often",),
    ),
    Mutation(
        "the upper end instead of the mean",
        "_verdict",
        'row["worse_upper"] <= row["margin"]',
        'row["worse_mean"] <= row["margin"]',
        (f"{RULES}::test_an_entry_is_non_inferior_up_to_its_margin",),
    ),
    Mutation(
        "pairs of the same seed",
        "studies.convergence:_row",
        "(trial, reference[seed]) for seed, trial in own.items() if seed in reference]",
        "*zip(own.values(), reference.values())]",
        (f"{RULES}::test_pairs_share_a_seed",),
    ),
    Mutation(
        "what broke off is worse than anything",
        "paired_difference",
        "    if not all(math.isfinite(one) for one in worse_by):\n",
        "    worse_by = [one for one in worse_by if math.isfinite(one)]\n    if not worse_by:\n",
        (f"{RULES}::test_what_broke_off_is_infinitely_worse_and_one_seed_is_none",),
    ),
    Mutation(
        "leaving the tuning out of the rows",
        "studies.convergence:summarize",
        '        if trial["phase"] == "final":\n',
        "        if True:\n",
        (f"{RULES}::test_pairs_share_a_seed",),
    ),
    Mutation(
        "keeping twice what was lost",
        "DoubledResidual.note_sent",
        '        self._next("residual", rows).mul_(2)\n',
        "",
        (f"{RULES}::test_a_doubled_residual_keeps_twice_what_was_lost",),
    ),
    Mutation(
        "a key that knows the bug and the seed",
        "key_of",
        "json.dumps([parts, others], sort_keys=True)",
        "json.dumps([parts], sort_keys=True)",
        (KEY,),
    ),
]
