"""Buffers that ranks write between steps, and the memory that parameters had before training."""

from __future__ import annotations

from tests.mutations.mutation import Mutation, row

WRITTEN = "tests/engine/test_written_buffers.py"
FORMER = "tests/engine/test_former_memory.py"
FIRST = f"{WRITTEN}::test_a_write_after_the_first_step_is_asked_for"
LATER = f"{WRITTEN}::test_a_later_first_write_warns_by_name_and_is_watched"
NONE = f"{WRITTEN}::test_without_writes_there_is_one_question_and_no_other_message"
CUT = f"{FORMER}::test_a_parameter_of_several_buckets_is_copied_once_all_have_arrived"
FOLLOWS = f"{FORMER}::test_shared_memory_follows_every_step_and_comes_back"

BUFFERS = [
    Mutation(
        "broadcasting watched buffers before forward",
        "BufferBroadcast._is_needed",
        "        if self._is_watched or not self._seen[0]:\n",
        "        if not self._seen[0]:\n",
        (FIRST,),
    ),
    Mutation(
        "asking for written buffers after the first step",
        "BufferBroadcast._is_needed",
        "        if asks:\n",
        "        if False:\n",
        (FIRST,),
    ),
    Mutation(
        "taking another rank's written buffers into account",
        "BufferBroadcast._is_needed",
        "of_any_rank([bool(written)], self._collectives)",
        "[bool(written)]",
        row("a buffer written between steps by rank 0 alone"),
    ),
    Mutation(
        "no broadcast before a forward behind one that only accumulates",
        "BufferBroadcast.prepare",
        "self.is_on and is_after_step else",
        "self.is_on else",
        (f"{WRITTEN}::test_writes_before_a_forward_that_only_accumulates_stay_as_under_ddp",),
    ),
    Mutation(
        "comparing versions of buffers",
        "BufferBroadcast._names",
        "        if buffers is now and versions == _versions(buffers):\n",
        "        if buffers is now:\n",
        (FIRST,),
    ),
    Mutation(
        "comparing identities of buffers",
        "BufferBroadcast._names",
        "        if buffers is now and versions == _versions(buffers):\n",
        "        if versions == _versions(buffers):\n",
        (FIRST,),
    ),
    Mutation(
        "watching buffers that another rank has written",
        "BufferBroadcast._hear",
        "        self._is_watched = True\n",
        "        self._is_watched = self._is_watched or bool(self._written)\n",
        (LATER,),
    ),
    Mutation(
        "the values that a broadcast has written are no write",
        "BufferBroadcast.finish",
        "            self._seen = buffers, _versions(buffers)\n",
        "            pass\n",
        (NONE, f"{WRITTEN}::test_a_later_first_write_warns_by_name_and_is_watched"),
    ),
    Mutation(
        "asking before each epoch's first forward",
        "DearStrategy.on_train_batch_start",
        "            self.pipeline_of().training.buffers.asks = True\n",
        "            pass\n",
        row("a buffer replaced between epochs"),
    ),
    Mutation(
        "copying arrived buckets to shared memory",
        "ParameterGatherer._wait",
        "        self.copy_to_shared([number])\n",
        "",
        (FOLLOWS,),
    ),
    Mutation(
        "copying buckets that no gather brings to shared memory",
        "ParameterGatherer.close_gates",
        "        self.copy_to_shared(range(len(self._buffers.buckets)))\n",
        "",
        (FOLLOWS,),
    ),
    Mutation(
        "going back to shared memory",
        "PlanLifecycle._release_active",
        "values.clone() if former is None else former.copy_(values)\n",
        "values.clone()\n",
        (FOLLOWS,),
    ),
    Mutation(
        "copying no parameter to shared memory of which a part is on its way",
        "ParameterGatherer.copy_to_shared",
        "            if is_new and self.pending.keys().isdisjoint(one.buckets):\n",
        "            if is_new:\n",
        (CUT,),
    ),
    Mutation(
        "looking for aliases a second time, after the first forward",
        "Training.warn_of_aliases",
        "self.aliased & aliased_names(self.module) if",
        "self.aliased if",
        (f"{FORMER}::test_an_alias_that_is_gone_by_the_first_step_gives_no_alarm",),
    ),
]
