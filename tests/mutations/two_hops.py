"""What makes two hops right: order, waits, who keeps what."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

TESTS = "tests/exchange/test_two_hops.py"
BITS = f"{TESTS}::test_sums_have_the_bits_of_the_layout_in_any_number_of_hops"
DENSE_ON_DEVICE = (
    "tests/streams/test_trainings.py::test_in_two_hops_numbers_are_those_of_one_process"
)
CODED_ON_DEVICE = (
    "tests/streams/test_trainings.py"
    "::test_in_two_hops_encoded_numbers_are_those_of_collectives_that_are_over_at_once"
)
LAW = f"{TESTS}::test_what_is_lost_arrives_later"
GOES_ON = f"{TESTS}::test_residuals_go_on_in_every_layout"

TWO_HOPS = [
    Mutation(
        "waiting for the first hop before the second",
        "PairwiseCollectives._pass_on",
        "                arrive()\n                if",
        "                if",
        (BITS,),
    ),
    Mutation(
        "summing a host's ranks in order",
        "TwoHopCollectives._reduce",
        "addends = by_source((*within[host :: len(own)], (self.world.rank, shard)))",
        "addends = [shard, *(one for _, one in within[host :: len(own)])]",
        (f"{TESTS}::test_three_ranks_of_a_host_are_summed_in_order",),
    ),
    Mutation(
        "summing hosts in order without hops",
        "PairwiseCollectives.launch_reduce_scatter",
        "partial(sum_in_source_order, addends, out, size))\n",
        "partial(sum_in_source_order, addends, out))\n",
        (BITS,),
    ),
    Mutation(
        "a thread for each half",
        "PairwiseCollectives._pass_on",
        "        key = lane, optimizer\n",
        '        key = "", optimizer\n',
        (f"{TESTS}::test_a_host_may_gather_long_before_the_other",),
    ),
    Mutation(
        "threads of an optimizer's own",
        "PairwiseCollectives._pass_on",
        "        key = lane, optimizer\n",
        "        key = lane, 0\n",
        (f"{TESTS}::test_two_optimizers_may_launch_in_another_order_on_each_rank",),
    ),
    Mutation(
        "only what hosts encode together is gathered in them",
        "ResidualKeeper.taken",
        "if len(bucket.encoded) > 1:",
        "if True:",
        (f"{TESTS}::test_what_ranks_keep_alone_stays_theirs",),
    ),
    Mutation(
        "waiting for the thread that encodes before flags leave",
        "CompressedExchange.take_found_inf",
        "            end()\n",
        "            pass\n",
        (f"{TESTS}::test_nan_of_one_rank_is_noticed_by_all_in_the_same_step",),
    ),
    Mutation(
        "what other ranks of a host keep, for another plan",
        "ResidualKeeper.taken",
        "                    collectives.launch_gather_of_host(flat, STATE_TAGS + bucket.number)"
        ".wait()\n",
        "                    pass\n",
        (LAW,),
    ),
    Mutation(
        "what a rank encodes alone, of what is loaded",
        "CompressedBucket.part_of",
        "flat if len(self.encoded) == 1 else torch.cat([flat[part] for part in self.encoded])",
        "flat[: sum(one.stop - one.start for one in self.encoded)]",
        (GOES_ON,),
    ),
    Mutation(
        "a row for each host",
        "RowLayout.of",
        'self.together if kind[0] == "worker" else 1',
        "1",
        (GOES_ON,),
    ),
    Mutation(
        "where a rank keeps what it owns and nobody uses",
        "CompressedBucket.__init__",
        "            begin - part.start\n",
        "            0\n",
        (LAW,),
    ),
    Mutation(
        "a device's second hop behind the first",
        "NativeTwoHopCollectives._two_hops",
        "            await_first()\n",
        "",
        (f"{DENSE_ON_DEVICE}[dense-2x2]",),
    ),
    Mutation(
        "a device's second hop beside the compute stream",
        "NativeTwoHopCollectives._two_hops",
        "        with self.streams.beside():\n",
        "        if True:\n",
        ("tests/streams/test_streams.py::test_between_two_hops_the_compute_stream_goes_on",),
    ),
    Mutation(
        "holding what the first hop was given until the second is over",
        "NativeTwoHopCollectives._two_hops",
        "[(*wait, first) for wait in launch_second()]",
        "launch_second()",
        ("tests/collectives/test_native.py",),
    ),
    Mutation(
        "flags behind what is encoded beside",
        "NativeTwoHopCollectives.launch_sums_of_host",
        "self.streams.follow_beside\n",
        "lambda: None\n",
        (f"{CODED_ON_DEVICE}[int8-2x2]",),
    ),
    Mutation(
        "reading what was found beside before that is free",
        "CompressedExchange.take_found_inf",
        "            self.collectives.streams.lead_readers()\n",
        "            pass\n",
        (f"{CODED_ON_DEVICE}[int8-2x2]",),
    ),
    Mutation(
        "node ranks that two machines have do not count",
        "hosts_of",
        "    elif _are_parted(nodes, machines):\n",
        "    elif False:\n",
        ("tests/lightning/test_hosts.py::test_which_ranks_share_a_host",),
    ),
    Mutation(
        "one kernel for the shards of all hosts",
        "NativeCollectives.start_together",
        "getattr(self.calls, private_names.COALESCING.name, None)",
        "None",
        ("tests/streams/test_coalescing.py",),
    ),
    Mutation(
        "communicators of each half's own",
        "NativeTwoHopCollectives._start_within",
        "2 * (call == ALL_GATHER)",
        "0",
        ("tests/streams/test_coalescing.py",),
    ),
    Mutation(
        "refusing waits that block the host",
        "_check_backend",
        " in _TRUE:",
        " in ():",
        ("tests/collectives/test_collectives.py::test_waits_that_block_the_host_are_refused",),
    ),
]
