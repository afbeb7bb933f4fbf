"""What exchanging codes must not do without."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

ENGINE = "tests/exchange/test_coded.py"
BITS = "tests/exchange/test_coded_bits.py"
CHANGES = "tests/exchange/test_codec_changes.py"
FAILURES = "tests/exchange/test_coded_failures.py"
LAGGING = "tests/exchange/test_lagging.py"
OTHER_RANKS = "tests/checkpoint/test_other_ranks.py"
SCHEDULE = "tests/callbacks/test_compression_schedule.py"
TURNS = "tests/exchange/test_turns.py"
TRAINER = "tests/lightning/test_compressors.py"
VOTES = "tests/exchange/test_votes.py"
SUMMABLE = "tests/exchange/test_summable.py"

LAW = f"{ENGINE}::test_what_is_lost_arrives_later"
RESUMED = f"{BITS}::test_a_resumed_run_has_the_same_bits"

CODED = [
    Mutation(
        "keeping what is pending once the step is made",
        "BucketRound.end_step",
        "        self.exchange.commit()\n",
        "",
        (LAW,),
    ),
    Mutation(
        "forgetting what is pending once gradients are dropped",
        "BucketRound.drop",
        "        self.exchange.discard()\n",
        "        self.exchange.commit()\n",
        (f"{ENGINE}::test_gradients_that_are_dropped_leave_residuals_alone",),
    ),
    Mutation(
        "the owner's residual",
        "CodedBucket.encode_gather",
        "        self.owner.commit()\n",
        "",
        (LAW,),
    ),
    Mutation(
        "clearing what residuals leave between parameters",
        "CodedBucket.compensate",
        "        rows.view(-1).index_fill_(0, self._worker_padding, 0.0)\n",
        "",
        (f"{FAILURES}::test_nothing_is_encoded_between_parameters",),
    ),
    Mutation(
        "clearing what decoding leaves between parameters before it becomes momentum",
        "CodedBucket.own_gradients",
        "            gradients.index_fill_(0, self._padding, 0.0)\n",
        "            pass\n",
        (f"{FAILURES}::test_the_norm_of_residuals_is_that_of_the_parameters",),
    ),
    Mutation(
        "leaving what lies between parameters out of the norm of residuals",
        "CompressedBucket.residual_norms",
        ".index_fill(0, padding, 0.0)",
        "",
        (f"{FAILURES}::test_the_norm_of_residuals_is_that_of_the_parameters",),
    ),
    Mutation(
        "looking at gradients once more after a hook",
        "ActivePlan.conceal_gradients",
        "        self.exchange.look_again()\n",
        "",
        (
            f"{FAILURES}::test_nan_from_a_hook_is_refused_on_all_ranks_and_changes_nothing",
            f"{FAILURES}::test_nan_from_a_hook_shows_on_all_ranks_where_the_host_does_not_look",
        ),
    ),
    Mutation(
        "refusing a second round of votes",
        "CodedExchange.add_earlier",
        "        if not is_empty:\n",
        "        if False:\n",
        (f"{VOTES}::test_votes_of_a_second_round_are_refused_on_all_ranks",),
    ),
    Mutation(
        "changing no codec under gradients on their way",
        "OptimizerPipeline.use_compressor",
        "is_idle=is_idle and not has_begun",
        "is_idle=True",
        (f"{CHANGES}::test_a_change_leaves_gradients_on_their_way_alone",),
    ),
    Mutation(
        "changing it after them",
        "CompressedExchange._begin_anew",
        "        if self._next is not None:\n",
        "        if False:\n",
        (f"{CHANGES}::test_a_change_leaves_gradients_on_their_way_alone",),
    ),
    Mutation(
        "refusing votes of some ranks only",
        "BucketRound._hear",
        "if is_absent and agreed[index]]:\n",
        "if False]:\n",
        (f"{VOTES}::test_a_gradient_that_one_rank_lacks_is_refused_on_all",),
    ),
    Mutation(
        "hearing of them where all were used here",
        "BucketRound._hear",
        " and not absent and ",
        " and ",
        (f"{VOTES}::test_a_gradient_that_one_rank_lacks_is_refused_on_all",),
    ),
    Mutation(
        "not counting the votes of a round without a gradient after others",
        "CodedExchange.add_earlier",
        "        bucket.mean.copy_(earlier)\n",
        "        pass\n",
        (f"{VOTES}::test_votes_without_a_gradient_do_not_count",),
    ),
    Mutation(
        "not counting the votes of a round without a gradient before others",
        "BucketRound.set_means_aside",
        "if self.has_means and any(self.used):\n",
        "if self.has_means:\n",
        (f"{VOTES}::test_votes_without_a_gradient_do_not_count",),
    ),
    Mutation(
        "keeping what nobody will step",
        "MeanGradient.finish_rounds",
        "        active.exchange.note_used(active.round.used, keeps=True)\n",
        "",
        (LAW,),
    ),
    Mutation(
        "not sending the owner's residual of what nobody will step",
        "CodedBucket.encode_gather",
        "        self.owner.keep(self._own_unused)\n",
        "",
        (LAW,),
    ),
    Mutation(
        "the mean of a vote",
        "CodedBucket._sum",
        "            mean.mul_(1 / self._world_size)\n",
        "            pass\n",
        (f"{ENGINE}::test_a_vote_is_that_of_the_majority",),
    ),
    Mutation(
        "summing on their way bytes that add up",
        "Reduction.__init__",
        "self._adds_up = collectives, compressor.is_summable",
        "self._adds_up = collectives, False",
        (f"{SUMMABLE}::test_only_bytes_that_add_up_are_summed_on_their_way",),
    ),
    Mutation(
        "decoding bytes that do not add up before they are summed",
        "Reduction.__init__",
        "self._adds_up = collectives, compressor.is_summable",
        "self._adds_up = collectives, True",
        (LAW,),
    ),
    Mutation(
        "telling all ranks of inf",
        "BucketRound._flags",
        "flags[end] = bool(found) if",
        "flags[end] = False if",
        (f"{FAILURES}::test_a_step_with_inf_is_refused_on_all_ranks_and_changes_nothing",),
    ),
    Mutation(
        "refusing a step with inf",
        "OptimizerPipeline._prepare_step",
        "        active.exchange.check()\n",
        "",
        (f"{FAILURES}::test_a_step_with_inf_is_refused_on_all_ranks_and_changes_nothing",),
    ),
    Mutation(
        "showing a loss scale that there was inf",
        "CompressedExchange.hear_found_inf",
        "        torch._foreach_mul_([coded.bucket.mean for coded in self.coded], factor)\n",
        "        pass\n",
        (f"{FAILURES}::test_a_loss_scale_hears_of_inf_on_another_rank",),
    ),
    Mutation(
        "random numbers that go on after a resume",
        "ResidualKeeper._overwrite",
        "            bucket.counts.update(own.counts)\n",
        "",
        (RESUMED,),
    ),
    Mutation(
        "another rate of what was left",
        "ResidualKeeper._collected",
        "                values.mul_(bucket.rate / rate)\n",
        "                pass\n",
        (f"{CHANGES}::test_another_rate_sends_as_much_of_what_was_left",),
    ),
    Mutation(
        "an owner's residual in checkpoints",
        "ResidualKeeper._overwrite",
        '                kept.copy_(self._collected(bucket, ("owner", name), own)[bucket.own])\n',
        "                pass\n",
        (RESUMED,),
    ),
    Mutation(
        "residuals that move to the next plan",
        "PlanLifecycle._leave_plan",
        "            self.residuals.release()\n",
        "            pass\n",
        (f"{ENGINE}::test_the_same_with_another_plan_in_mid_run",),
    ),
    Mutation(
        "decoding by the codec that encoded",
        "CodedBucket._decode",
        "        encoded.decode(wire, rows)\n",
        "        self.codec.decode(wire, rows, encoded.generator(rows.device))\n",
        (f"{CHANGES}::test_densities_may_change_with_gathers_still_under_way",),
    ),
    Mutation(
        "the same places on all ranks for random-k",
        "CodedBucket._encode",
        '            seed = self._seed_of(f"turns {self.tag}") + turn\n',
        "            seed = turn + self._collectives.world.rank\n",
        (f"{BITS}::test_every_codec_leaves_the_same_bits_on_all_ranks",),
    ),
    Mutation(
        "one turn for both halves of a step and for all of its rounds",
        "CodedBucket._encode",
        '        turn = self.counts["gather" if self.is_sent_back else "reduce"]\n',
        "        turn = self.counts[half] + self.counts['reduce']\n",
        (TURNS,),
    ),
    Mutation(
        "going through all places in turn",
        "compression:_draw",
        "torch.randint(turn, 2**62 + turn, (k,)",
        "torch.randint(2**62, (k,)",
        ("tests/compression/test_sparse.py::test_every_number_has_its_turn",),
    ),
    Mutation(
        "looking for what piles up with owners",
        "CodedBucket.encode_gather",
        "            look(row, self.most)\n",
        "            pass\n",
        (FAILURES,),
    ),
    Mutation(
        "knowing what was published, for writes from outside",
        "Bucket",
        "            self.published.copy_(self.replica)\n\n    def adopt",
        "            pass\n\n    def adopt",
        (f"{LAGGING}::test_replicas_are_close_behind",),
    ),
    Mutation(
        "taking over writes before replicas are made equal",
        "OptimizerPipeline.sync_replicas",
        '        self.prepare_state("sync_replicas")\n',
        '        self.complete_parameters("sync_replicas")\n',
        (f"{LAGGING}::test_what_was_written_or_loaded_is_made_equal_too",),
    ),
    Mutation(
        "sending what is left with a dense step",
        "CodedExchange.launch_gather",
        "        coded.flush()\n",
        "",
        (f"{CHANGES}::test_a_dense_step_sends_all_that_was_left",),
    ),
    Mutation(
        "every rank's residual in a folder",
        "sharded",
        "        before = 0 if kind[0] in OF_ALL else rows.of(kind)[0] * numel\n",
        "        before = 0\n",
        (f"{TRAINER}::test_checkpoints_go_on_with_the_same_bits",),
    ),
    Mutation(
        "residuals of a fit before",
        "ResidualKeeper._on_loading",
        "        if self._parameters:\n            self.put_in(held or",
        "        if False:\n            self.put_in(held or",
        (f"{BITS}::test_loading_in_mid_run_brings_its_residuals",),
    ),
    Mutation(
        "an equal share of all that workers kept",
        "unpacked.own",
        "saved.sum(0) / count",
        "saved.mean(0)",
        (f"{OTHER_RANKS}::test_nothing_is_lost_where_other_ranks_go_on",),
    ),
    Mutation(
        "other random numbers for other optimizers",
        "CodedBucket.__init__",
        "        self.tag = traffic.first_tag + bucket.number\n",
        "        self.tag = bucket.number\n",
        (f"{BITS}::test_two_optimizers_draw_other_random_numbers",),
    ),
    Mutation(
        "masters that other ranks go on with",
        "ShardedOptimizer.adopt_state",
        "                piece.parameter.copy_(master)\n",
        "                pass\n",
        (f"{OTHER_RANKS}::test_masters_move_where_other_ranks_go_on",),
    ),
    Mutation(
        "refusing a schedule that nobody drives",
        "CompressionSchedule.setup",
        'getattr(trainer.strategy, "compression_schedule", None) is not self:\n',
        "False:\n",
        (f"{SCHEDULE}::test_a_schedule_is_driven_for_one_fit",),
    ),
    Mutation(
        "refusing densities that no step would have",
        "CompressionSchedule.__init__",
        "            if later <= dense_steps:\n",
        "            if later < dense_steps:\n",
        (f"{SCHEDULE}::test_a_density_that_no_step_would_have_is_refused",),
    ),
]
