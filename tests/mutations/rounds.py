"""Rounds of buckets, what gates and trees of modules keep of earlier steps, and private names."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

ROUND = "tests/engine/test_bucket_round.py"
GATE = "tests/engine/test_gate.py"
TREE = "tests/engine/test_module_tree.py"
NAMES = "tests/test_private_names.py"

ROUNDS = [
    Mutation(
        "nothing of a rank without a batch",
        "BucketRound._launch",
        "            bucket.gradients.zero_()\n",
        "            pass\n",
        (f"{ROUND}::test_a_rank_without_a_batch_counts_nothing_whatever_its_buckets_hold",),
    ),
    Mutation(
        "posting the receives of flags",
        "BucketRound.expect",
        "        self._collectives.expect_max(num_flags, self._tag)\n",
        "",
        (f"{ROUND}::test_all_receives_are_posted_by_expect",),
    ),
    Mutation(
        "flags of votes and notes",
        "BucketRound.expect",
        " + len(self._voted) + self._notes.num_bytes + 1",
        " + 1",
        (f"{ROUND}::test_all_receives_are_posted_by_expect",),
    ),
    Mutation(
        "a gate that is used again holds what its module holds now",
        "ModuleGate.close",
        "                dict.update(spare, present)\n",
        "                pass\n",
        (f"{GATE}::test_what_is_put_there_again_holds_what_the_modules_own_dict_holds",),
    ),
    Mutation(
        "seeing modules that were exchanged",
        "ModuleTree.look",
        "        if self._seen and _are_same(self._seen, [*self._held()]):\n",
        "        if self._seen:\n",
        (f"{TREE}::test_a_look_finds_what_was_exchanged",),
    ),
    Mutation(
        "seeing buffers that were exchanged",
        "ModuleTree.buffers",
        " or not _are_same(self._seen_buffers, seen)",
        " or not self._seen_buffers",
        (f"{TREE}::test_buffers_are_those_that_the_modules_hold_now",),
    ),
    Mutation(
        "a wait that has failed fails again",
        "Work.wait",
        "            self._arrive = partial(_raise, error)\n",
        "            self._arrive = _nothing\n",
        ("tests/collectives/test_work.py::test_a_wait_that_has_failed_fails_again",),
    ),
    Mutation(
        "saying that Lightning has no such name",
        "PrivateName.replace_in",
        "            warnings.warn(self._complaint(), stacklevel=3)\n",
        "            pass\n",
        (f"{NAMES}::test_a_name_that_is_gone_is_told_with_the_way_out",),
    ),
]
