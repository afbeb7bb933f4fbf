"""What comparing launches between ranks must not do without."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

LOG = "tests/collectives/test_launch_log.py"
RING = "tests/collectives/test_many_ranks.py::test_in_a_ring_each_rank_sends_only_to_the_next"
TURN = (
    "tests/collectives/test_many_ranks.py::"
    "test_in_turn_each_rank_waits_for_the_head_of_a_message_before_it_sends_to_the_next"
)
TRIAL = "tests/engine/test_ring_trial.py"
MANY = "tests/collectives/test_many_ranks.py"
BOARD = "tests/strategy/test_failures.py"

LAUNCHES = [
    Mutation(
        "waiting for tails of messages that are sent in turn",
        "PairwiseCollectives._reduce_in_turn",
        "number % num_parts]",
        "False]",
        (TURN,),
    ),
    Mutation(
        "waiting for the head of a message before the next is sent",
        "PairwiseCollectives._reduce_in_turn",
        "            return [receives[num_parts * number], *sends]\n",
        "            tails.append(receives[num_parts * number])\n            return sends\n",
        (TURN,),
    ),
    Mutation(
        "letting go of groups whose default group was destroyed",
        "_process_groups",
        "        weakref.finalize(dist.group.WORLD, forget_process_groups).atexit = False\n",
        "",
        (
            "tests/collectives/test_collectives.py::test_a_default_group_that_is_destroyed_is_let_go",
        ),
    ),
    Mutation(
        "the rank to which no message can be posted",
        "PairwiseCollectives._post",
        "                how = blamed(peer, 0.0, str(error))\n",
        "                how = str(error)\n",
        (f"{MANY}::test_posting_to_a_rank_that_is_gone_names_it",),
    ),
    Mutation(
        "new groups after receives that no launch has used",
        "Pipeline.detach",
        "        self.collectives.end_training()\n",
        "",
        (
            "tests/fabric/test_life.py"
            "::test_a_model_deleted_after_a_step_that_raised_leaves_nothing_to_the_next",
        ),
    ),
    Mutation(
        "reports that name no rank",
        "FailureBoard._suspect",
        " and all(_CLOSED_BY.search(one) for one in reports)",
        "",
        (f"{BOARD}::test_a_report_that_names_no_rank_leaves_every_mute_rank_dead",),
    ),
    Mutation(
        "comparing launches in every round",
        "PlanLifecycle.__init__",
        "LaunchDigest(collectives, number), ",
        "",
        (
            "tests/engine/test_launch_digest.py",
            "tests/streams/test_launch_digest.py",
        ),
    ),
    Mutation(
        "the order of launches where messages are matched by order",
        "LaunchLog.add",
        "self._orders[owner] * _FACTOR + kind.hash",
        "self._orders[owner] + kind.hash",
        ("tests/streams/test_launch_digest.py",),
    ),
    Mutation(
        "buckets of equal size in the digest",
        "NativeCollectives.launch_reduce_scatter",
        "own, buffer, tag=tag)",
        "own, buffer)",
        ("tests/streams/test_launch_digest.py",),
    ),
    Mutation(
        "a coalesced wait without a time limit",
        "NativeCollectives.start_together",
        "lambda *_: together.wait()",
        "together.wait",
        ("tests/streams/test_coalescing.py",),
    ),
    Mutation(
        "launches of two optimizers that keep no order",
        "divergence",
        "order == other_order or _ALL in (order, other_order)",
        "True",
        (LOG,),
    ),
    Mutation(
        "the complement in a digest",
        "Digest.say",
        "_LARGEST - value",
        "value",
        (f"{LOG}::test_a_digest_explains_if_and_only_if_numbers_differ",),
    ),
    Mutation(
        "launches of ranks that hang",
        "FailureBoard._suspicion",
        "if not self._mute and (",
        "if False and (",
        (f"{BOARD}::test_ranks_that_wait_for_each_other_in_vain_are_told_so",),
    ),
    Mutation(
        "round trips in the time to wait for reports",
        "FailureBoard._poll",
        "        timeout_s = REPORT_WAIT_S + _NUM_TRIPS * self.trip_s\n",
        "        timeout_s = REPORT_WAIT_S\n",
        (f"{BOARD}::test_where_the_store_is_far_reports_may_come_later",),
    ),
    Mutation(
        "aborting what other ranks never launch",
        "FailureWatch.close",
        "            self._on_closed()\n",
        "            pass\n",
        ("tests/streams/test_leaving.py",),
    ),
    Mutation(
        "waiting for the device before that",
        "Collectives.abort_if_stuck",
        "        if waiter.is_alive():\n",
        "        if True:\n",
        ("tests/streams/test_leaving.py",),
    ),
    Mutation(
        "aborting at exit after a failure",
        "abort_after_failure",
        "            collectives.abort_if_stuck()\n",
        "            pass\n",
        ("tests/collectives/test_native.py",),
    ),
    Mutation(
        "passing flags on among many ranks",
        "rounds_of",
        "size <= _MOST_DIRECT",
        "size",
        (MANY,),
    ),
    Mutation(
        "waiting for a round before the next one",
        "PairwiseCollectives._pass_on",
        "                arrive()\n                if",
        "                if",
        (MANY,),
    ),
    Mutation(
        "the widest buffers first",
        "ModuleTree.buffers",
        "sorted(by_dtype.values(), key=lambda one: -one[0].element_size())",
        "[*by_dtype.values()]",
        ("tests/engine/test_delays.py::test_buffers_of_all_types_travel_in_one_message",),
    ),
    Mutation(
        "writing module buffers once",
        "BufferBroadcast.finish",
        "        self._launched = None\n",
        "",
        ("tests/engine/test_delays.py::test_buffers_that_the_user_writes_stay",),
    ),
    Mutation(
        "shards of a ring in the order in which they come",
        "PairwiseCollectives._gathered_rows",
        "(before, shards[(rank - hop) % size])",
        "(before, shards[(rank + hop) % size])",
        (RING,),
    ),
    Mutation(
        "other tags in a ring",
        "PairwiseCollectives._gathered_rows",
        "tag + _RING_TAGS",
        "tag",
        (RING,),
    ),
    Mutation(
        "a ring only for hosts of one rank",
        "PairwiseCollectives.can_use_rings",
        " and len({*hosts}) == len(hosts)",
        "",
        (TRIAL,),
    ),
    Mutation(
        "a ring only where all ranks wait",
        "RingTrial.say",
        "median(one for _, one in self._steps) < step_s / 2 or ",
        "",
        (TRIAL,),
    ),
    Mutation(
        "no ring that is slower",
        "RingTrial.say",
        " or step_s > self._limit_s",
        "",
        (TRIAL,),
    ),
    Mutation(
        "validation counts in no trial",
        "RingTrial._mean_step_s",
        " if step_s <= limit_s",
        "",
        (TRIAL,),
    ),
    Mutation(
        "trying a ring ever less often",
        "RingTrial.hear",
        "2 * self._next_rest",
        "self._next_rest",
        (TRIAL,),
    ),
]
