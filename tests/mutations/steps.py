"""Waits, guards and flushes of the engine, whatever travels."""

from __future__ import annotations

from tests.mutations.mutation import Mutation, row

MODULES = "tests/engine/test_modules.py"
READING = "tests/engine/test_reading.py"
PLAIN = "tests/engine/test_plain_backward.py"
GRADIENTS = "tests/engine/test_gradients.py"
CONTRACT = "tests/optimizers/test_optimizer_contract.py"
CALLS = "tests/engine/test_saved_calls.py"
STATE = "tests/optimizers/test_state.py"
DELAYS = "tests/engine/test_delays.py"
MASTERS = "tests/optimizers/test_masters.py"
DELETED = "tests/fabric/test_life.py::test_a_model_deleted_in_mid_step_launches_nothing"
EXCHANGED = "tests/engine/test_exchanged_optimizers.py"


WAITS = [
    Mutation(
        "waiting for a gathered bucket",
        "ParameterGatherer._wait",
        "        with self._waiting(reason):\n            work.wait()\n",
        "        with self._waiting(reason):\n            pass\n",
        (f"{READING}::test_evaluation_forwards_read_new_values_and_update_nothing",),
    ),
    Mutation(
        "waiting for reduced buckets",
        "BucketRound.finish",
        "                work.wait()\n",
        "                pass\n",
        (f"{DELAYS}::test_delays_change_nothing",),
    ),
    Mutation(
        "closing gates",
        "ParameterGatherer.close_gates",
        "                    reader.close()\n",
        "                    pass\n",
        (f"{READING}::test_reads_between_steps_see_the_new_values",),
    ),
    Mutation(
        "waiting before a module's forward",
        "_Reader.__call__",
        "        if not self._gatherer.is_idle:\n",
        "        if False:\n",
        row("recurrent layers (GRU)", "weights read through a held list"),
    ),
    Mutation(
        "waiting for what is read outside any module",
        "OptimizerPipeline.complete_entry",
        '            active.gatherer.complete(active.gatherer.entry, "training_step")\n',
        "            pass\n",
        (f"{READING}::test_a_held_tensor_read_outside_any_module_is_waited_for",),
    ),
    Mutation(
        "waiting for it again after a step in mid-forward",
        "OptimizerPipeline._on_inner_step",
        "        if self._training.is_in_forward:\n",
        "        if False:\n",
        (f"{READING}::test_it_is_waited_for_after_a_step_in_mid_forward",),
    ),
    Mutation(
        "all modules that read a held tensor",
        "ForwardRecorder._record_read",
        "        if id(value) not in self._gated[-1] and (is_first or self._running):\n",
        "        if id(value) not in self._gated[-1] and is_first:\n",
        (f"{READING}::test_every_module_that_reads_a_held_tensor_waits",),
    ),
    Mutation(
        "recording what is read behind a step in mid-forward",
        "PlanLifecycle.follow_parameters",
        "            self.active.gatherer.follow(self._training.module, self.recording.ungated)\n",
        "            pass\n",
        (f"{READING}::test_it_is_waited_for_after_a_step_in_mid_forward",),
    ),
    Mutation(
        "counting reads anew behind a step in mid-forward",
        "ForwardRecorder.note_step",
        "        self._seen.clear()\n",
        "",
        (f"{READING}::test_it_is_waited_for_after_a_step_in_mid_forward",),
    ),
    Mutation(
        "waiting for all in front of a compiled region",
        "OptimizerPipeline.complete_entry",
        '            active.gatherer.complete(reason="unknown reads")\n',
        "            pass\n",
        (f"{READING}::test_a_compiled_function_over_held_tensors_is_waited_for",),
    ),
    Mutation(
        "waiting for module buffers",
        "BufferBroadcast.finish",
        "            work.wait()\n",
        "            pass\n",
        (f"{DELAYS}::test_module_buffers_follow_rank_0_however_late",),
    ),
    Mutation(
        "completing parameters before the step",
        "MeanGradient._bring",
        '        self.plans.complete_parameters("step")\n',
        "",
        (f"{READING}::test_nothing_is_under_way_into_a_parameter_when_it_is_stepped",),
    ),
    Mutation(
        "completing parameters before others' step hooks",
        "OptimizerPipeline._on_inner_step",
        '            self.plans.complete_parameters("optimizer step hook")\n',
        "            pass\n",
        (f"{CONTRACT}::test_post_hooks_see_the_users_groups_and_the_new_values",),
    ),
    Mutation(
        "completing parameters before a new plan",
        "PlanLifecycle._leave_plan",
        '        self.complete_parameters("re-plan")\n',
        "",
        (
            "tests/engine/test_replan.py::test_values_that_have_not_arrived_yet_are_in_the_next_plan",
        ),
    ),
    Mutation(
        "completing parameters at the end",
        "Pipeline.detach",
        '            self.complete_parameters("teardown")\n',
        "            pass\n",
        (f"{DELAYS}::test_delays_change_nothing",),
    ),
]

GUARDS = [
    Mutation(
        "leaving the gradients of a plain backward in `.grad`",
        "OptimizerPipeline._on_gradient",
        "        if self._backward is not _LAST:\n",
        "        if self._backward is _LOCAL:\n",
        (f"{PLAIN}::test_it_launches_nothing",),
    ),
    Mutation(
        "a plain backward leaves the state of the step as it is",
        "OptimizerPipeline._keep_in_grad",
        "        if self._backward is _LOCAL:\n",
        "        if not self.progress.has_means:\n",
        (f"{PLAIN}::test_it_launches_nothing",),
    ),
    Mutation(
        "bumping versions",
        "ParameterGatherer._wait",
        "        torch.autograd.graph.increment_version(self._parameters_of[number])\n",
        "        pass\n",
        (f"{READING}::test_a_stale_read_that_no_gate_sees_is_refused",),
    ),
    Mutation(
        "refusing a gradient of a pending parameter",
        "OptimizerPipeline._on_gradient",
        "            active.gatherer.check_was_complete(index, self.plans.trained.names[index])\n",
        "            pass\n",
        (f"{READING}::test_a_gradient_for_a_pending_parameter_names_it",),
    ),
    Mutation(
        "the audit",
        "audit.check",
        "        if any(number in active.gatherer.pending for number in buckets):\n",
        "        if False:\n",
        (f"{READING}::test_an_audit_finds_a_read_that_takes_part_in_no_backward",),
    ),
    Mutation(
        "refusing what no rank could know of",
        "GradientCollector._check_may_be_late",
        "        if self._round.has_means or self._collectives.wait_blocks_host:\n",
        "        if True:\n",
        (f"{READING}::test_a_second_gradient_that_nobody_could_know_of_names_the_remedy",),
    ),
    Mutation(
        "zeros for parameters without a gradient",
        "GradientCollector.collect_rest",
        "                placement.gradient.zero_()\n",
        "                pass\n",
        (f"{STATE}::test_parameters_unused_by_all_or_by_some_are_stepped_as_ddp_steps_them",),
    ),
    Mutation(
        "counting gradients before a launch",
        "GradientCollector.on_gradient",
        "        if self._num_calls[index] < self._expected[index]:\n",
        "        if False:\n",
        (f"{STATE}::test_gradients_that_come_in_parts_are_sent_once",),
    ),
    Mutation(
        "copying what is held before more is added to it",
        "GradientCollector._collect",
        "                self._copy_held(placement.buckets[0])\n",
        "",
        (f"{CALLS}::test_what_comes_again_before_a_bucket_is_full_is_added",),
    ),
    Mutation(
        "copying what is held of buckets that are never full",
        "GradientCollector.collect_rest",
        "            self._copy_held(number)\n",
        "            pass\n",
        (f"{STATE}::test_parameters_unused_by_all_or_by_some_are_stepped_as_ddp_steps_them",),
    ),
    Mutation(
        "copying at once what somebody else has, too",
        "GradientCollector._collect",
        " and getrefcount(gradient) <= _OF_A_LOCAL",
        "",
        (f"{CALLS}::test_what_is_done_to_a_gradient_after_its_hooks_does_not_count",),
    ),
    Mutation(
        "leaving late gradients to another round",
        "BucketRound.finish",
        "        return bool(self.late)\n",
        "        return False\n",
        (f"{GRADIENTS}::test_gradients_that_come_after_the_launch_are_added",),
    ),
    Mutation(
        "adding up rounds",
        "Exchange.add_earlier",
        "            bucket.mean.add_(earlier)\n",
        "            pass\n",
        (f"{GRADIENTS}::test_a_backward_after_a_reduce_is_added",),
    ),
    Mutation(
        "the vote on an overflow",
        "ActivePlan.unscale",
        "        self.exchange.collectives.launch_max(overflow).wait()\n",
        "",
        (f"{GRADIENTS}::test_an_overflow_in_one_shard_skips_the_step_on_all",),
    ),
    Mutation(
        "unused parameters stay unused",
        "SteppedPieces.set_gradients",
        "            if not used[piece.tensor_index]:\n",
        "            if False:\n",
        (f"{STATE}::test_parameters_unused_by_all_or_by_some_are_stepped_as_ddp_steps_them",),
    ),
    Mutation(
        "refusing parameters that are new between forward and step",
        "TrainedParameters.check_unchanged",
        "        if self.have_changed(counts_thawed=counts_thawed):\n            raise",
        "        if False:\n            raise",
        (f"{CONTRACT}::test_parameters_that_are_new_at_the_step_are_refused",),
    ),
    Mutation(
        "a new plan for new parameters",
        "OptimizerPipeline.follow",
        "        self.plans.dissolve()\n",
        "",
        (f"{STATE}::test_unfreezing_in_mid_training_rebuilds_the_plan_and_keeps_state",),
    ),
    Mutation(
        "a new plan for other parameters",
        "TrainedParameters.have_changed",
        "            return True\n",
        "            return False\n",
        (f"{EXCHANGED}::test_other_parameters_in_a_group_are_trained",),
    ),
    Mutation(
        "comparing options in every step",
        "SharedOptions.explain",
        '        check_options(f"step with different options: {name}", reports)\n',
        "        pass\n",
        ("tests/engine/test_shared_options.py::test_all_ranks_refuse_the_step",),
    ),
    Mutation(
        "a closure that was not called",
        "ShardedOptimizer.finish",
        "        if not self._last_run:\n            raise",
        "        if False:\n            raise",
        (f"{CONTRACT}::test_a_step_that_never_calls_its_closure_is_refused",),
    ),
    Mutation(
        "module buffers behind the last reduce-scatters on all ranks",
        "MeanGradient.finish_rounds",
        "            active.round.launch_all()\n            if sends_buffers:\n"
        "                self.training.buffers.launch()\n",
        "            if sends_buffers:\n                self.training.buffers.launch()\n"
        "            active.round.launch_all()\n",
        (
            "tests/engine/test_launch_order.py"
            "::test_a_rank_that_lacks_a_gradient_launches_in_the_order_of_the_others",
        ),
    ),
    Mutation(
        "numbers of their own for a second optimizer's buckets",
        "PlanLifecycle._build",
        "collectives, self.number * MAX_BUCKETS",
        "collectives, 0",
        (f"{GRADIENTS}::test_two_optimizers_number_their_buckets_apart",),
    ),
]

FLUSHES = [
    Mutation(
        "ending what was begun before gradients are dropped",
        "OptimizerPipeline.drop_gradients",
        "                self.mean.finish_rounds(active)\n",
        "                pass\n",
        (f"{CONTRACT}::test_a_dropped_backward_may_leave_other_buckets_on_other_ranks",),
    ),
    Mutation(
        "forgetting dropped gradients",
        "OptimizerPipeline.drop_gradients",
        "            active.round.drop()\n            active.collector.begin()\n"
        "            self.stepper.clear_gradients()\n",
        "            pass\n",
        (f"{GRADIENTS}::test_dropped_gradients_leave_nothing_behind",),
    ),
    Mutation(
        "taking exposed gradients back",
        "MeanGradient.reduce",
        "            active.conceal_gradients()\n",
        "            pass\n",
        (f"{GRADIENTS}::test_what_is_done_to_exposed_gradients_counts",),
    ),
    Mutation(
        "taking over data put in place of a parameter's",
        "FlatBuffers.adopt_writes",
        "            placement.view.copy_(placement.parameter.data)\n",
        "",
        (f"{READING}::test_writes_between_steps_are_kept",),
    ),
    Mutation(
        "taking over writes to 16-bit parameters",
        "FlatBuffers.adopt_writes",
        "            bucket.adopt_writes()\n",
        "            pass\n",
        (f"{MASTERS}::test_writes_from_outside_reach_the_masters",),
    ),
    Mutation(
        "rounding masters into parameters",
        "exchange:Exchange.launch_gather",
        "            bucket.publish()\n",
        "            pass\n",
        (f"{MASTERS}::test_parameters_are_the_masters_rounded",),
    ),
    Mutation(
        "masters in saved state",
        "SteppedPieces.state_of",
        "            return {**state, MASTER_KEY: piece.parameter}\n",
        "            return state\n",
        (f"{MASTERS}::test_masters_survive_saving_and_loading",),
    ),
    Mutation(
        "state as it was loaded, not cast to 16 bits",
        "undo_casts",
        "        if parameter.dtype not in LOW_PRECISION:\n",
        "        if True:\n",
        (f"{MASTERS}::test_masters_survive_saving_and_loading",),
    ),
    Mutation(
        "taking over loaded state",
        "OptimizerPipeline._prepare_step",
        "        self.plans.take_over()\n",
        "        active.flat.adopt_writes()\n",
        (f"{STATE}::test_resuming_gives_the_bits_of_the_uninterrupted_run",),
    ),
    Mutation(
        "weights written after masters were loaded",
        "PlanLifecycle.take_over",
        "if self._tell_of_masters(self._stepper.adopt_state()):",
        "if self._tell_of_masters(self._stepper.adopt_state()) and False:",
        (f"{MASTERS}::test_what_is_written_after_loading_reaches_the_masters",),
    ),
    Mutation(
        "forgetting masters that nobody has stepped",
        "checked",
        "        files.forget_masters(checkpoint)\n",
        "        pass\n",
        (
            "tests/fabric/test_checkpoints.py"
            "::test_masters_that_another_strategy_has_not_stepped_are_forgotten",
        ),
    ),
    Mutation(
        "gradients given to what nobody used",
        "ActivePlan.conceal_gradients",
        "            self.round.used[index] = is_used\n",
        "            self.round.used[index] &= is_used\n",
        (f"{GRADIENTS}::test_a_gradient_given_to_what_nobody_used_counts",),
    ),
    Mutation(
        "sending before the step where order counts",
        "Pipeline.hold_back",
        "                part.is_held_back = True\n",
        "                pass\n",
        (f"{GRADIENTS}::test_two_optimizers_send_in_one_order_where_collectives_must_keep_it",),
    ),
    Mutation(
        "fp32 state beside fp32 masters",
        "cut_state",
        "piece.role.has_master and flat.is_floating_point()\n",
        "False\n",
        (
            "tests/fabric/test_checkpoints.py"
            "::test_what_ddp_has_kept_in_16_bits_is_fp32_beside_masters",
        ),
    ),
    Mutation(
        "the same of two models",
        "DearFabricStrategy.setup_module_and_optimizers",
        "            one.hold_back()\n",
        "            pass\n",
        (
            "tests/fabric/test_pipelines.py::test_two_models_hold_their_gradients_back_where"
            "_collectives_must_keep_one_order",
        ),
    ),
    Mutation(
        "launching nothing where a model is deleted",
        "DearModule.take",
        "_end_deleted, pipeline",
        "_end_of, pipeline",
        (DELETED,),
    ),
    Mutation(
        "memory of messages under way where a model is deleted",
        "_end_deleted",
        "        under_way.append(",
        "        (",
        (DELETED,),
    ),
    Mutation(
        "putting assigned parameters back",
        "TrainedParameters.have_moved",
        "        self._restore_replaced()\n",
        "",
        (f"{READING}::test_writes_between_steps_are_kept",),
    ),
    Mutation(
        "waiting in modules that took others' place",
        "OptimizerPipeline._prepare_step",
        "        self.plans.follow_readers()\n",
        "",
        (f"{MODULES}::test_exchanged_modules_wait_where_they_read",),
    ),
    Mutation(
        "the wait for what TorchScript reads",
        "ParameterGatherer.close_gates",
        '        self.complete(self.ungatable, "TorchScript")\n',
        "",
        (f"{MODULES}::test_what_torchscript_reads_is_complete_when_the_step_returns",),
    ),
    Mutation(
        "the users' groups after a step that raised",
        "OptimizerPipeline.abandon",
        "        self.stepper.restore()\n",
        "",
        (f"{CONTRACT}::test_a_step_after_an_interrupted_one_finds_the_users_groups",),
    ),
]
