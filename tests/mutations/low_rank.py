"""What the low-rank exchange, and codecs of some tensors alone, must not do without."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

LOW_RANK_TESTS = "tests/exchange/test_low_rank.py"
GROUPS = "tests/exchange/test_codec_groups.py"
BACKWARD = "tests/engine/test_backward_waits_for_nobody.py"

LAW = f"{LOW_RANK_TESTS}::test_what_is_lost_arrives_later"
BETWEEN = f"{LOW_RANK_TESTS}::test_the_same_whatever_happens_in_between"

LOW_RANK = [
    Mutation(
        "no wait for another rank in backward",
        "LowRankExchange._launch_first",
        "        self._unsent.append(partial(",
        "        first.wait()\n        self._unsent.append(partial(",
        (f"{BACKWARD}::test_one_rank_uses_a_layer_less_often_in_front_of_a_collective",),
    ),
    Mutation(
        "no second message in backward",
        "LowRankExchange._launch_first",
        "        return Work(partial(self._arrive, low))\n",
        "        self._unsent.pop()()\n        return Work(partial(self._arrive, low))\n",
        (f"{LOW_RANK_TESTS}::test_only_factors_and_vectors_travel",),
    ),
    Mutation(
        "waiting for the first message",
        "LowRankExchange._launch_second",
        "        first.wait()\n",
        "",
        (LAW,),
    ),
    Mutation(
        "waiting for the second message",
        "LowRankExchange._arrive",
        "        self._seconds[low.number].wait()\n",
        "",
        (f"{LOW_RANK_TESTS}::test_it_is_as_near_as_torchs_own",),
    ),
    Mutation(
        "raising again where a wait has failed",
        "LowRankExchange._arrive",
        "            self._unsent[0]()\n"
        "            # Removed only after the call, so that a wait that has failed fails again.\n"
        "            self._unsent.popleft()\n",
        "            self._unsent.popleft()()\n",
        ("tests/exchange/test_low_rank_failures.py",),
    ),
    Mutation(
        "keeping what the factors do not bring",
        "LowRankBucket.encode_second",
        "        self.worker.note_lost(self._flat, scale)\n",
        "",
        (LAW,),
    ),
    Mutation(
        "this rank's own factors in its residual",
        "LowRankBucket.encode_second",
        "            own.addmm_(left, right.t(), alpha=-1)\n",
        "            own.addmm_(left, right.t(), alpha=-0.5)\n",
        (LAW,),
    ),
    Mutation(
        "starting from the last step's factor",
        "LowRankBucket.commit",
        "        self.factors.update(self._pending)\n",
        "",
        (f"{LOW_RANK_TESTS}::test_it_is_as_near_as_torchs_own",),
    ),
    Mutation(
        "an orthonormal factor",
        "LowRankBucket.encode_second",
        "            left.copy_(low_rank.orthonormal(left))\n",
        "",
        (f"{LOW_RANK_TESTS}::test_what_has_no_more_rank_arrives_as_it_is",),
    ),
    Mutation(
        "a share of what nobody will step, for each rank",
        "CompressedBucket.note_used",
        "                share = mean / self._num_owners\n",
        "                share = mean\n",
        (LAW,),
    ),
    Mutation(
        "factors that move to the next plan",
        "ResidualKeeper._overwrite",
        "                    factor.copy_(saved)\n",
        "                    pass\n",
        (f"{LOW_RANK_TESTS}::test_factors_go_into_checkpoints_and_survive_another_plan",),
    ),
    Mutation(
        "buckets of their own for tensors with another codec",
        "engine:spec_of",
        "{tensor.device.type}/{codec}",
        "{tensor.device.type}",
        (f"{GROUPS}::test_vectors_travel_as_they_are_and_nothing_is_lost",),
    ),
    Mutation(
        "a schedule that leaves other codecs as they are",
        "CompressedExchange.use",
        "            coded.use(compressor if follows else coded.configured)\n",
        "            coded.use(compressor)\n",
        (f"{GROUPS}::test_a_schedule_and_another_plan_keep_the_groups",),
    ),
    Mutation(
        "momentum of what a codec leaves out",
        "CodedBucket.__init__",
        "        keeps = options.compressor if has_momentum else compressor\n",
        "        keeps = compressor\n",
        (f"{GROUPS}::test_what_dgc_leaves_out_has_its_momentum",),
    ),
    Mutation(
        "leaving a plan's buckets as they are",
        "CodedBucket.__init__",
        "        used = Fp32() if bucket.number in traffic.uncompressed else compressor\n",
        "        used = compressor\n",
        (f"{GROUPS}::test_a_plan_leaves_buckets_as_they_are",),
    ),
    Mutation(
        "what a plan leaves as it is keeps of its own",
        "CodedBucket.__init__",
        "            owner = compressor.owner_memory(shard, device)\n",
        "            is_left = bucket.number in traffic.uncompressed\n"
        "            kept = options.compressor if is_left else compressor\n"
        "            owner = kept.owner_memory(shard, device)\n",
        (f"{GROUPS}::test_what_a_plan_leaves_as_it_is_has_its_own_feedback",),
    ),
    Mutation(
        "no memory of what loses nothing",
        "Compressor.owner_memory",
        "self.has_feedback and not self.is_identity",
        "self.has_feedback",
        (f"{GROUPS}::test_nothing_is_kept_of_what_is_never_encoded",),
    ),
]
