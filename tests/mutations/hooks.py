"""What is removed of our hooks' places among others', and of what those are shown."""

from __future__ import annotations

from tests.mutations.mutation import Mutation, row

TESTS = "tests/engine/test_hooks.py"

HOOKS = [
    Mutation(
        "completing parameters before the rest of an overridden optimizer_step",
        "complete_behind_step",
        "            complete(hook)\n",
        "            pass\n",
        row("weights clamped in the module's own optimizer_step"),
    ),
    Mutation(
        "completing parameters before an overridden lr_scheduler_step",
        "complete_behind_step",
        "[: 1 + is_by_step]",
        "[:1]",
        row("weights clamped in the module's own lr_scheduler_step"),
    ),
    Mutation(
        "a guard in the learning rate finder",
        "DearStrategy.on_train_start",
        "            self._insert_guard(self._trainer, at_end=True)\n",
        "            pass\n",
        row("lr_find of a module that reads gradients"),
    ),
    Mutation(
        "saving for SLURM when all ranks have stopped",
        "StopRequest._code",
        "            self._requeue()\n",
        "",
        (
            "tests/lightning/test_sigterm.py::test_slurm_starts_again_from_the_step_after_which_all_stopped",
        ),
    ),
    Mutation(
        "keeping a directory with other files",
        "making_way",
        "        if held and not any(",
        "        if not held and not any(",
        (
            "tests/checkpoint/test_distributed_checkpoint.py::test_a_directory_with_other_files_stays",
        ),
    ),
    Mutation(
        "refusing other numbers of threads",
        "_how",
        "    threads = ",
        '    threads = "" if steps_whole or factorizes else ',
        ("tests/exchange/test_low_rank.py::test_other_numbers_of_threads_are_refused",),
    ),
    Mutation(
        "staying behind others' hooks of AccumulateGrad",
        "OptimizerPipeline.backward",
        "        self.plans.trained.hooks.stay_last()\n",
        "",
        row("register_hook, register_multi_grad_hook and hooks of AccumulateGrad, at any time"),
    ),
    Mutation(
        "zeros for a gradient that a hook has cleared",
        "OptimizerPipeline._on_gradient",
        "                parameter.grad = torch.zeros_like(parameter)\n",
        "                pass\n",
        # SGD does with zeros what it does without a gradient.
        row("register_post_accumulate_grad_hook that clears .grad", how="adamw-3"),
    ),
    Mutation(
        "putting hooks back that autograd has forgotten",
        "PlanLifecycle.take_over",
        "            self.trained.watch(self._on_gradient)\n",
        "            pass\n",
        (f"{TESTS}::test_gradients_are_sent_in_backward_after_parameters_were_of_another_dtype",),
    ),
    Mutation(
        "beginning a step behind others' pre-hooks",
        "StepHooks._on_step",
        "            self._lists[1].move_to_end(self._begin.id)\n",
        "",
        (f"{TESTS}::test_hooks_of_a_step_keep_their_places",),
    ),
    Mutation(
        "completing parameters before others' pre-hooks",
        "OptimizerPipeline._before_hooks",
        '        self.plans.complete_parameters("optimizer step hook")\n',
        "",
        (f"{TESTS}::test_a_pre_hook_sees_the_users_groups_and_the_values_of_the_last_step",),
    ),
    Mutation(
        "gradients between the closure and the step",
        "DearStrategy.backward",
        "            self._expose_gradients(None)\n",
        "            pass\n",
        row("optimizer_step that calls the closure first, and clips in between and in a pre-hook"),
    ),
    Mutation(
        "graphs that take a forward's place",
        "ModuleTree._held",
        '        yield from (other_forward(own) for own in self._dicts if "forward" in own)\n',
        "",
        ("tests/engine/test_modules.py", "tests/streams/test_captured.py"),
    ),
    Mutation(
        "waiting for what a graph reads",
        "has_compiled_region",
        "other_forward(vars(part)) is not None",
        "False",
        ("tests/streams/test_captured.py",),
    ),
    Mutation(
        "showing the mean to hooks on all ranks, where one rank has them",
        "MeanGradient.expose_to_hooks",
        "bool(self.plans.hooks_signal.heard)",
        "is_here",
        (f"{TESTS}::test_a_hook_of_one_rank_lets_no_rank_wait",),
    ),
    Mutation(
        "asking on NCCL in the first step who has hooks",
        "MeanGradient.expose_to_hooks",
        "            is_anywhere = any(collectives.all_gather_object(is_here))\n",
        "            pass\n",
        (f"{TESTS}::test_a_hook_of_one_rank_lets_no_rank_wait",),
    ),
    Mutation(
        "showing hooks nothing before backward",
        "OptimizerPipeline._before_hooks",
        " and self.progress.is_due",
        "",
        (f"{TESTS}::test_hooks_before_backward_and_behind_the_step_find_no_gradient",),
    ),
    Mutation(
        "showing hooks the mean behind backward",
        "OptimizerPipeline._before_hooks",
        "shows = asks and self.mean.expose_to_hooks(is_here=is_here)",
        "shows = False",
        row("a step's pre-hooks that read and clip gradients in manual optimisation"),
    ),
    Mutation(
        "telling of hooks that were registered too late",
        "OptimizerPipeline._before_hooks",
        "is_late = asks and is_here and not shows",
        "is_late = False",
        (f"{TESTS}::test_a_hook_that_comes_after_the_round_is_told_that_it_misses_the_mean_once",),
    ),
    Mutation(
        "waiting outside of torch's list of hooks of all optimizers",
        "StepHooks._on_step",
        "            if self._are_in_front_of_all:\n                self._before()\n",
        "            self._before()\n",
        (f"{TESTS}::test_hooks_of_all_optimizers_may_change_while_a_step_waits",),
    ),
]
