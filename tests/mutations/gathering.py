"""What `gather="gradients"` must not do without."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

GATHERING_TESTS = "tests/engine/test_gathering.py"
THREADS = "tests/engine/test_threads.py"
REPLICATED = "tests/optimizers/test_replicated.py"
TENSORWISE = "tests/optimizers/test_tensorwise.py"
CONTEXTS = (f"{REPLICATED}::test_an_update_does_not_see_the_contexts_around_a_read",)


GATHERING = [
    Mutation(
        "a step that is done with before its gates close",
        "OptimizerPipeline._on_inner_step",
        "        active.round.end_step()\n        active.gatherer.close_gates()\n",
        "        active.gatherer.close_gates()\n        active.round.end_step()\n",
        (
            "tests/exchange/test_codec_changes.py::test_a_step_is_committed_before_another_thread_may_complete_it",
        ),
    ),
    Mutation(
        "other threads' wait for the end of a step",
        "OptimizerPipeline._prepare_step",
        "        active.gatherer.begin_step()\n",
        "",
        (f"{THREADS}::test_a_thread_that_completes_in_a_step_waits_for_its_end",),
    ),
    Mutation(
        "waiting for a thread that has ended",
        "ParameterGatherer._wait_for_end_of_step",
        "        if not has_ended and thread is not None and not thread.is_alive():\n",
        "        if False:\n",
        (f"{THREADS}::test_a_thread_that_ends_within_its_step_keeps_no_other_waiting",),
    ),
    Mutation(
        "zero_grad's wait for an update that another thread makes",
        "OptimizerPipeline._on_zero_grad",
        "        with nullcontext() if active is None else active.gatherer.arriving:\n",
        "        if True:\n",
        (f"{THREADS}::test_zero_grad_waits_for_an_update_that_another_thread_makes",),
    ),
    Mutation(
        "ending a step that broke off",
        "OptimizerPipeline.abandon",
        "            self.plans.active.gatherer.end_step()\n",
        "            pass\n",
        (f"{THREADS}::test_a_step_that_breaks_off_keeps_no_thread_waiting",),
    ),
    Mutation(
        "stepping a bucket when its gradient has arrived",
        "OptimizerPipeline._on_arrival",
        "            self.stepper.step_bucket(number)\n",
        "            pass\n",
        (f"{GATHERING_TESTS}::test_every_optimizer_has_the_bits_of_ddp",),
    ),
    Mutation(
        "options as they were at the step",
        "DeferredStep.__init__",
        "        self._options = [_copied(group) for group in optimizer.param_groups]\n",
        "        self._options = optimizer.param_groups\n",
        (f"{REPLICATED}::test_options_count_as_they_were_at_the_step",),
    ),
    Mutation(
        "copying learning rates that are tensors",
        "_copy_of",
        "        return value.detach().clone()\n",
        "        return value\n",
        (f"{REPLICATED}::test_a_learning_rate_in_a_tensor_counts_as_it_was_at_the_step",),
    ),
    Mutation(
        "completing before the state is read",
        "OptimizerPipeline.__init__",
        "self._hooks.append(optimizer.register_state_dict_pre_hook(self._complete_state))\n",
        "pass\n",
        (f"{REPLICATED}::test_state_is_torchs_own_and_is_read_complete",),
    ),
    Mutation(
        "completing before state is loaded",
        "OptimizerPipeline.__init__",
        "optimizer.register_load_state_dict_pre_hook(self._complete_state)",
        "optimizer.register_state_dict_pre_hook(self._complete_state)",
        (f"{REPLICATED}::test_loaded_state_comes_behind_what_is_pending",),
    ),
    Mutation(
        "completing before a dropped backward is reduced",
        "OptimizerPipeline.drop_gradients",
        '                self.plans.complete_parameters("zero_grad")\n',
        "",
        (
            f"{REPLICATED}::test_a_bucket_that_no_forward_reads_is_completed_before_its_next_gradients",
        ),
    ),
    Mutation(
        "keeping frozen parameters out of the empty step",
        "ReplicatedOptimizer.begin_step",
        "        self._leave_only_managed()\n",
        "",
        (f"{REPLICATED}::test_a_gradient_left_on_a_frozen_parameter_is_not_stepped",),
    ),
    Mutation(
        "refusing to step twice what broke off",
        "ReplicatedOptimizer.step_bucket",
        "        deferred, self._deferred = self._deferred, None\n",
        "        deferred = self._deferred\n",
        (f"{REPLICATED}::test_a_step_that_breaks_off_is_never_made_twice",),
    ),
    *(
        Mutation(
            f"updating outside {name}",
            "plain_mode",
            f"        stack.enter_context({context})\n",
            "",
            CONTEXTS,
        )
        for name, context in (
            ("inference mode", "torch.inference_mode(False)"),
            ("autocast", "torch.autocast(device_type, enabled=False)"),
            ("torch.func", "_cleared_transforms()"),
        )
    ),
    Mutation(
        "updating outside dispatch modes",
        "plain_mode",
        "stack.enter_context(_without_modes()):",
        "():",
        CONTEXTS,
    ),
    Mutation(
        "cutting no tensor",
        "PlanLifecycle._activate",
        "            plan = with_whole_tensors(plan, recording.tensors)\n",
        "            pass\n",
        (f"{REPLICATED}::test_another_plan_keeps_state_and_cuts_no_tensor",),
    ),
    Mutation(
        "trying the options of every parameter group",
        "_kinds",
        "enumerate(optimizer.param_groups)",
        "enumerate(optimizer.param_groups[:1])",
        ("tests/optimizers/test_elementwise.py::test_every_group_is_tried_with_its_own_options",),
    ),
    Mutation(
        "hiding all-reduced gradients after the step",
        "ReplicatedOptimizer.restore",
        "                placement.parameter.grad = None\n",
        "                pass\n",
        (f"{GATHERING_TESTS}::test_a_norm_of_all_reduced_gradients_counts_each_once",),
    ),
    Mutation(
        "trying whether tensors can be stepped one by one",
        "why_not_tensorwise",
        "type(optimizer) not in _KNOWN and ",
        "None and ",
        (f"{TENSORWISE}::test_what_couples_tensors_is_refused",),
    ),
]
