"""What local steps must not do without."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

LAW = "tests/local_steps/test_law.py"
CODECS = "tests/local_steps/test_codecs.py"
SCHEDULE = "tests/local_steps/test_schedule.py"
FITS = "tests/lightning/test_local_steps.py"
HABITS = "tests/lightning/test_local_habits.py"
WEIGHTS = "tests/lightning/test_local_weights.py"
STREAMS = "tests/streams/test_local_steps.py"
FABRIC = "tests/fabric/test_local_steps.py"
BITS = f"{LAW}::test_bits_of_the_reference"

LOCAL_STEPS = [
    Mutation(
        "an exchange that would be sent before the first step",
        "Schedule.merged_after",
        "if step > self.delay else None",
        "",
        (f"{SCHEDULE}::test_each_exchange_is_sent_once_and_merged_once",),
    ),
    Mutation(
        "the mean over ranks of pseudo-gradients",
        "Fragment.launch",
        "            bucket.gradients.mul_(self.round.weights.scale)\n",
        "            pass\n",
        (BITS,),
    ),
    Mutation(
        "a fragment whose shard waits beside the anchor",
        "Fragment._build",
        "Role.LAGGING",
        "Role.SHARDED",
        (BITS,),
    ),
    Mutation(
        "gathered values that wait beside the anchor",
        "Fragment._build",
        ", is_staged=True",
        "",
        (BITS,),
    ),
    Mutation(
        "the replica's own share in a merge",
        "Fragment.merge",
        "value.to(anchor.dtype), mix)",
        "value.to(anchor.dtype), 0.5 * mix)",
        (BITS,),
    ),
    Mutation(
        "zeros between tensors in messages",
        "Fragment._take",
        "            bucket.gradients.zero_()\n",
        "            bucket.gradients.fill_(float('nan'))\n",
        (f"{CODECS}::test_all_ranks_have_one_anchor_after_every_merge",),
    ),
    Mutation(
        "residuals of an exchange that was merged",
        "Fragment.merge",
        "            self.round.end_step()\n",
        "            self.round.drop()\n",
        (f"{CODECS}::test_what_was_sent_and_what_is_left_is_what_ranks_had",),
    ),
    Mutation(
        "leaving out an exchange of values that are not finite",
        "Fragment.step",
        "        if self._bad.heard:\n            return\n",
        "",
        (f"{FITS}::test_a_rank_with_nan_takes_the_anchor_and_others_go_on",),
    ),
    Mutation(
        "the anchor where a rank's values are not finite",
        "OuterHalf.after_step",
        "                self._recover()\n",
        "                pass\n",
        (f"{FITS}::test_a_rank_with_nan_takes_the_anchor_and_others_go_on",),
    ),
    Mutation(
        "sending what is left at the end",
        "OptimizerRounds.flush",
        "        for fragment in rest:\n            self._send(fragment)\n"
        "        for fragment in rest:\n            self._merge(fragment, 0.0)\n",
        "",
        (BITS,),
    ),
    Mutation(
        "the anchor at validation",
        "DearStrategy._before_hook",
        "            self._outer.show_anchor()\n",
        "            pass\n",
        (f"{FITS}::test_validation_and_files_have_the_anchor",),
    ),
    Mutation(
        "the anchor in checkpoints",
        "DearStrategy.lightning_module_state_dict",
        "        self._outer.show_anchor()\n",
        "",
        (f"{FITS}::test_validation_and_files_have_the_anchor",),
    ),
    Mutation(
        "the outer optimizer's state in files",
        "OuterHalf.load",
        "            fragment.load(saved[_OUTER + model])\n",
        "            pass\n",
        (f"{FITS}::test_a_file_goes_on_with_the_outer_state",),
    ),
    Mutation(
        "a mean of BatchNorm's buffers",
        "OuterHalf.of",
        "        if averages_buffers and _buffers_of(tree):\n",
        "        if not averages_buffers:\n",
        (f"{FITS}::test_validation_in_a_fit_is_that_of_ddp_on_the_saved_weights",),
    ),
    Mutation(
        "masters of 16-bit parameters in a merge",
        "OptimizerRounds.publish",
        "            bucket.publish()\n",
        "            pass\n",
        (f"{HABITS}::test_16_bit_parameters_train_by_masters",),
    ),
    Mutation(
        "optimizer state that goes over with local steps",
        "PipelineStrategy._end_of_dense_steps",
        "            optimizer.load_state_dict(state)\n",
        "            pass\n",
        (f"{HABITS}::test_optimizer_state_goes_over",),
    ),
    Mutation(
        "fragments of parameters that come later",
        "OptimizerRounds._exchange",
        "            self._follow()\n",
        "",
        (f"{HABITS}::test_parameters_that_come_later_are_exchanged",),
    ),
    Mutation(
        "wishes to stop that travel with exchanges",
        "OptimizerRounds._exchange",
        "                one.stop.ask = self.shared.signal.ask\n",
        "",
        (f"{HABITS}::test_a_stop_request_acts_at_the_merge_that_carried_it",),
    ),
    Mutation(
        "comparing learning rates in exchanges",
        "RoundDigest.value",
        "*(sorted(one.items()) for one in options)",
        "0",
        (f"{HABITS}::test_other_learning_rates_are_named",),
    ),
    Mutation(
        "comparing options between ranks",
        "local_steps:_agreed_seed",
        "        if options != said[0][0]:\n",
        "        if False:\n",
        (f"{HABITS}::test_ranks_with_other_options_are_refused",),
    ),
    Mutation(
        "the anchor in evaluation under Fabric",
        "DearModule.forward",
        "                self.outer.show_anchor()\n",
        "                pass\n",
        (f"{FABRIC}::test_evaluation_and_the_end_have_the_anchor",),
    ),
    Mutation(
        "process groups of local steps' own",
        "OuterHalf.of",
        "        reusable_groups.clear()\n",
        "",
        (f"{FITS}::test_a_second_fit_gets_other_groups",),
    ),
    Mutation(
        "samples of a round alone",
        "OptimizerRounds.__init__",
        ", maxlen=shared.steps.every + 1",
        "",
        (f"{BITS}_by_samples",),
    ),
    Mutation(
        "saying what ranks compare when it is sent",
        "Fragment.send",
        "        self._notes.say()\n",
        "",
        (f"{BITS}_by_samples",),
    ),
    Mutation(
        "launching messages that wait for samples no later than they are stepped",
        "Fragment.step",
        "        self.launch(blocks=True)\n",
        "",
        (f"{BITS}_by_samples",),
    ),
    Mutation(
        "flags that are compared with those of their own fragment alone",
        "_Kind.__init__",
        "launch.tag < BUFFERS_TAG",
        "launch.tag < 1 << 24",
        (f"{BITS}_by_samples",),
    ),
    Mutation(
        "on NCCL, waiting in the stream that reads",
        "BucketRound.watch",
        "numbers if self._collectives.wait_blocks_host else ()",
        "numbers",
        (f"{STREAMS}::test_bits_of_the_reference",),
    ),
    Mutation(
        "on NCCL, refusing values that a compressor cannot send",
        "CompressedExchange.hear_found_inf",
        "self._is_staged or ",
        "",
        (f"{STREAMS}::test_values_that_a_compressor_cannot_send_raise_on_all_ranks",),
    ),
    Mutation(
        "refusing loaders whose end ranks cannot tell each other",
        "Loaders.shared",
        "if -1 in lengths and len(lengths) > 1 and self._trains_alone:",
        "if False:",
        (f"{WEIGHTS}::test_a_loader_without_a_length_is_refused_on_all_ranks",),
    ),
    Mutation(
        "forgetting state of whole tensors that is not finite",
        "OptimizerRounds.forget_inner",
        "        self.part.stepper.outside.plain.clear()\n",
        "",
        (f"{HABITS}::test_whole_tensor_optimizers_train_inside_and_forget_nan",),
    ),
    Mutation(
        "refusing outer optimizers of whole tensors",
        "LocalSteps.new_outer",
        "if why_not_elementwise(made) is not None:",
        "if False:",
        (f"{HABITS}::test_an_outer_optimizer_of_whole_tensors_is_refused",),
    ),
    Mutation(
        "shared memory follows a merge",
        "OptimizerRounds.publish",
        "            active.gatherer.copy_to_shared(range(len(active.flat.buckets)))\n",
        "",
        (f"{HABITS}::test_shared_memory_has_what_the_module_has",),
    ),
    Mutation(
        "parameters that are not exchanged are named after the first merge",
        "OuterHalf.after_step",
        "            self._compare_unheld()\n",
        "            pass\n",
        (f"{HABITS}::test_parameters_that_are_not_exchanged_are_named",),
    ),
    Mutation(
        "parameters that are not exchanged are named at the end",
        "OuterHalf.finish",
        "            self._compare_unheld()\n",
        "            pass\n",
        (f"{HABITS}::test_parameters_that_are_not_exchanged_are_named",),
    ),
    Mutation(
        "what was settled is not merged again",
        "OptimizerRounds._exchange",
        "if one.sent_at is not None):\n",
        "if True):\n",
        (f"{HABITS}::test_parameters_that_come_later_are_exchanged",),
    ),
    Mutation(
        "refusing before dense steps",
        "PipelineStrategy._new_halves",
        "                steps.check(module, optimizer)\n",
        "                pass\n",
        (f"{HABITS}::test_refusals_do_not_wait_for_the_end_of_dense_steps",),
    ),
]
