"""Waits and guards of what travels through the host for a device."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

SIMULATED = "tests/streams/test_staged.py"
REAL = "tests/collectives/test_staged.py"
DENSE = tuple(
    f"{SIMULATED}::test_bits_are_those_of_gloo[{one}]" for one in ("dense-True", "dense-False")
)
ENCODED = tuple(
    f"{SIMULATED}::test_encoded_bits_are_those_of_gloo[{one}]" for one in ("int8", "oktopk")
)
ENCODED_IN_TWO_HOPS = (f"{SIMULATED}::test_in_two_hops_encoded_bits_are_those_of_gloo[int8]",)

STAGED = [
    Mutation(
        "the wait of the stream in which a watched message is waited for",
        "StagedCollectives._stage",
        "Work(partial(self._await, arrival), lambda: arrival.result()())",
        "Work(lambda: arrival.result()())",
        (f"{SIMULATED}::test_the_stream_waits_in_which_a_watched_message_is_waited_for",),
    ),
    Mutation(
        "a copy down behind what writes the tensor",
        "CudaStreams.copy_down",
        "        self._down.wait_stream(self.current())\n",
        "",
        DENSE,
    ),
    Mutation(
        "the event of a copy down behind the copy",
        "CudaStreams.copy_down",
        "event.record(self._down)",
        "event.record(self.current())",
        DENSE,
    ),
    Mutation(
        "the wait of the stream that reads for the copy up",
        "CudaStreams.copy_up",
        "            self.current().wait_event(event)\n",
        "",
        DENSE,
    ),
    Mutation(
        "the wait of copies down for copies up from the same memory",
        "CudaStreams.copy_up",
        "            self._down.wait_event(event)\n",
        "",
        (f"{SIMULATED}::test_a_copy_down_waits_for_a_copy_up_from_the_same_memory",),
    ),
    Mutation(
        "a copy up on a stream of its own",
        "CudaStreams.copy_up",
        "with self._cuda.stream(self._up):",
        "with self._cuda.stream(self._cuda.default_stream(self.device)):",
        DENSE,
    ),
    Mutation(
        "the wait of a send for the copy that it sends",
        "collectives.staged:_after",
        "    copied()\n",
        "",
        (f"{REAL}::test_a_launch_does_not_wait_for_the_copy_and_sends_what_it_brings",),
    ),
    Mutation(
        "what a copy raises, raised before the wait for messages",
        "StagedCollectives._stage",
        "            copied()\n",
        "",
        (f"{REAL}::test_a_copy_that_fails_is_raised_at_once_and_blames_no_rank",),
    ),
    Mutation(
        "what a copy raises, raised before the wait for encoding",
        "StagedCollectives.launch_sums_of_host",
        "            self._calls.wait_for(whole)\n",
        "",
        (f"{REAL}::test_a_copy_that_fails_ends_the_wait_for_encoding",),
    ),
    Mutation(
        "the end of a wait where another rank has failed",
        "StagedCollectives._await",
        "            if self.has_given_up:\n",
        "            if False:\n",
        (f"{REAL}::test_a_wait_ends_once_another_rank_is_known_to_have_failed",),
    ),
    Mutation(
        "calls that one thread makes",
        "_SendsBehindCopies._call",
        "self._launcher.submit(partial(_after, copied, call))",
        'background.Background("another").submit(partial(_after, copied, call))',
        (f"{REAL}::test_all_reduces_are_launched_in_one_order",),
    ),
    Mutation(
        "the wait of another thread's send for the copy",
        "_SendsBehindCopies._call",
        "        return _after(partial(self.wait_for, tensor), call)\n",
        "        return call()\n",
        (f"{REAL}::test_a_send_of_another_thread_waits_for_the_copy",),
    ),
    Mutation(
        "sends that a thread makes, and not the caller",
        "_SendsBehindCopies.behind",
        "        self._present.copied = copied\n",
        "        copied()\n",
        (f"{REAL}::test_a_launch_does_not_wait_for_the_copy_and_sends_what_it_brings",),
    ),
    Mutation(
        "the wait of a launch for a message in the same memory",
        "StagedCollectives._stage",
        "                earlier.wait()\n",
        "                pass\n",
        (f"{SIMULATED}::test_a_launch_waits_for_a_message_in_the_same_memory",),
    ),
    Mutation(
        "the end of a bucket's message",
        "StagedCollectives._forget",
        "self._under_way.pop((lane, tag), None)",
        "pass",
        (f"{SIMULATED}::test_a_bucket_that_was_waited_for_is_let_go_of",),
    ),
    Mutation(
        "the wait for the messages before the copy up",
        "StagedCollectives._stage",
        "            work.wait()\n",
        "",
        DENSE,
    ),
    Mutation(
        "a thread of its own for each optimizer's arrivals",
        "StagedCollectives._stage",
        "key = lane, _optimizer(tag)",
        "key = lane, 0",
        (f"{SIMULATED}::test_optimizers_may_be_in_another_order_on_each_rank",),
    ),
    Mutation(
        "memory on the device that is held while it is copied down",
        "StagedCollectives._stage",
        "return staged.then(partial(self._forget, lane, tag, down))",
        "return staged.then(partial(self._forget, lane, tag, None))",
        ENCODED,
    ),
    Mutation(
        "the copy up of a message of no bucket on the stream that waits",
        "StagedCollectives._stage",
        "self.streams.copy_up(up) if is_bucket else partial(_copy_up, up)",
        "self.streams.copy_up(up)",
        (f"{SIMULATED}::test_models_with_buffers_and_tied_weights[conv]",),
    ),
    Mutation(
        "gathers that are expected after the gradients were sent",
        "StagedCollectives.expect_all_gather",
        ' and ("reduce_scatter", tag) not in self._under_way',
        "",
        (f"{SIMULATED}::test_no_gather_is_expected_in_gradients_that_are_sent",),
    ),
    Mutation(
        "the wait of the host for its sums, encoded",
        "StagedCollectives.launch_sums_of_host",
        "            copied()\n",
        "",
        ENCODED_IN_TWO_HOPS,
    ),
    Mutation(
        "encoding of the host's sums on another stream than the training's",
        "StagedCollectives.launch_sums_of_host",
        "with self.streams.beside():",
        "if True:",
        ENCODED_IN_TWO_HOPS,
    ),
    Mutation(
        "the wait for the encoding before flags",
        "StagedCollectives.launch_sums_of_host",
        "            ends[0]()\n",
        "",
        (f"{REAL}::test_the_end_of_encoding_is_waited_for",),
    ),
    Mutation(
        "the wait for flags that lie on the device",
        "StagedCollectives.launch_max",
        "        self.streams.copy_down(*pair)()\n",
        "        self.streams.copy_down(*pair)\n",
        (f"{SIMULATED}::test_bits_are_those_of_gloo[loss_scale-True]",),
    ),
    Mutation(
        "own encoded rows that are kept once they are there",
        "PairwiseCollectives.launch_all_to_all",
        "        keep = partial(incoming[own].copy_, rows[own])\n",
        "        incoming[own].copy_(rows[own])\n        keep = None\n",
        ENCODED,
    ),
    Mutation(
        "memory of a plan that is over",
        "StagedCollectives.begin_plan",
        " if _optimizer(k[0]) != optimizer}",
        "}",
        (f"{SIMULATED}::test_a_new_plan_lets_go_of_the_memory_of_the_old_one",),
    ),
    Mutation(
        "inf that is heard on the host",
        "BucketRound._flags",
        "bool(found) if flags.is_cpu and self._collectives.wait_blocks_host else found",
        "found",
        ENCODED,
    ),
    Mutation(
        "a timeline whose threads wait",
        "StreamClock.observe",
        "        if self._in_threads:\n",
        "        if False:\n",
        (f"{SIMULATED}::test_a_timeline_blocks_no_launch",),
    ),
    Mutation(
        "telling what the way through the host takes where nothing goes that way",
        "say_what_staging_costs",
        "    if isinstance(collectives, staged.StagedCollectives):\n",
        "    if collectives.world.size > 1:\n",
        (
            "tests/lightning/test_hosts.py"
            "::test_the_way_through_the_host_is_told_at_the_start_beside_nccl",
        ),
    ),
    Mutation(
        "the tail of a message whose copies and sums the link does not wait for",
        "LinkQueue._carry_next",
        "end_s + message.tail_s\n",
        "end_s\n",
        ("tests/apps/test_plan.py::test_copies_and_sums_take_time_on_the_way_through_the_host",),
    ),
    Mutation(
        "the bus as the slowest part of the way",
        "Network.through_host",
        "longest = max(seconds, *copies)",
        "longest = seconds",
        ("tests/simulator/test_network.py",),
    ),
]
