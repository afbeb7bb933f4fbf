"""What residuals are made of, what is taken, and what becomes of what nobody uses."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

DTYPE = "tests/checkpoint/test_default_dtype.py"
SAME = f"{DTYPE}::test_training_is_the_same_within_any_default_dtype"
SHORT = "test_a_stranger_with_a_small_rate_passes_within_a_short_default_dtype"
UNUSED = "tests/exchange/test_lagging_unused.py"
MEMORY = "tests/checkpoint/test_memory.py"
PEAKS = f"{MEMORY}::test_memory_of_a_checkpoint_and_of_other_plans"

KEPT = [
    Mutation(
        "residuals of fp32",
        "Memory.__init__",
        "partial(torch.zeros, numel, dtype=torch.float32, device=device)",
        "partial(torch.zeros, numel, device=device)",
        (SAME,),
    ),
    Mutation(
        "residuals that are loaded as fp32",
        "ResidualKeeper._collected",
        "torch.zeros(bucket.spec.padded_numel, dtype=torch.float32, device=device)",
        "torch.zeros(bucket.spec.padded_numel, device=device)",
        (SAME,),
    ),
    Mutation(
        "factors of fp32",
        "LowRankBucket.__init__",
        "torch.empty(num_columns, rank, dtype=torch.float32, device=device)",
        "torch.empty(num_columns, rank, device=device)",
        (SAME,),
    ),
    Mutation(
        "factors that begin as fp32",
        "starting_factor",
        "torch.randn(shape, dtype=torch.float32, generator=generator)",
        "torch.randn(shape, generator=generator)",
        (SAME,),
    ),
    Mutation(
        "a loss scale of fp32",
        "loss_scale",
        "torch.ones(1, dtype=torch.float32, device=device)",
        "torch.ones(1, device=device)",
        (f"{DTYPE}::test_a_loss_scale_is_fp32_within_any_default_dtype",),
    ),
    Mutation(
        "trying an optimizer out with fp32",
        "_new_tensor",
        "dtype=torch.float32, device=device",
        "device=device",
        (f"tests/optimizers/test_elementwise.py::{SHORT}",),
    ),
    Mutation(
        "measuring a link with fp32",
        "train_times",
        "partial(torch.empty, dtype=torch.float32, device=device)",
        "partial(torch.empty, device=device)",
        (
            "tests/tuning/test_tuning.py::test_the_link_is_measured_in_fp32_within_any_default_dtype",
        ),
    ),
    Mutation(
        "not moving what nobody uses, whatever its bytes say",
        "CodedBucket._write",
        "                differences[part].zero_()\n",
        "                pass\n",
        (f"{UNUSED}::test_what_nobody_uses_stays_where_it_is",),
    ),
    Mutation(
        "sending zeros of what nobody uses",
        "CodedBucket.encode_gather",
        "            row[:, part].zero_()\n",
        "            pass\n",
        (f"{UNUSED}::test_what_nobody_uses_takes_nothing_of_a_message",),
    ),
    Mutation(
        "the norm of all that is still to be sent, at any rate",
        "CompressedBucket.residual_norms",
        "            / memory.rate\n",
        "",
        (
            "tests/exchange/test_coded_failures.py"
            "::test_the_norm_of_residuals_is_that_of_what_has_not_arrived",
        ),
    ),
    Mutation(
        "taking rows that are not finite",
        "_HalfFloat.encode",
        "        wire[:, 2 * numel :].zero_()\n",
        "        wire[:, 2 * numel :].zero_()\n"
        "        if not rows.isfinite().all():\n"
        "            raise OverflowError\n",
        ("tests/compression/test_properties.py", "-kfp16"),
    ),
    Mutation(
        "agreeing on the gradients that a hook has left",
        "of_any_rank",
        "    collectives.launch_max(flags).wait()\n",
        "",
        (
            "tests/exchange/test_lagging_unused.py"
            "::test_a_gradient_that_a_hook_clears_on_one_rank_is_stepped_on_all",
        ),
    ),
    Mutation(
        "a checkpoint's state on rank 0 alone",
        "gathered",
        "collectives.world.rank == 0 or not on_rank_0\n",
        "True\n",
        (f"{MEMORY}::test_others_than_rank_0_keep_descriptions_of_what_a_checkpoint_takes",),
    ),
    Mutation(
        "letting go of state that is sent",
        "move",
        "            item.have.clear()\n        done",
        "            pass\n        done",
        (PEAKS,),
    ),
    Mutation(
        "letting go of a plan's buffers before the parameters get others",
        "PlanLifecycle._release_active",
        "        self.active = None\n        for",
        "        for",
        (PEAKS,),
    ),
    Mutation(
        "no checkpoint once moving state has failed",
        "OptimizerPipeline.prepare_state",
        "        if self.plans.is_moving:\n",
        "        if False:\n",
        (f"{MEMORY}::test_no_state_is_saved_once_moving_it_has_failed",),
    ),
    Mutation(
        "writes to lagging weights between two trainings",
        "PlanLifecycle.inherit",
        "left.take(MASTER_KEY, {*compress(was_written, map(any, flags))})",
        "left.take(MASTER_KEY, set())",
        (f"{MEMORY}::test_what_is_written_to_lagging_weights_between_two_trainings_stays",),
    ),
    Mutation(
        "what is loaded between two trainings",
        "PlanLifecycle.hand_over",
        "None if was_loaded else ",
        "",
        (f"{MEMORY}::test_what_is_loaded_between_two_trainings_is_all_there_is",),
    ),
    Mutation(
        "refusing state of another memory format",
        "hand_on",
        "        _check_layout(parameter, described)\n",
        "",
        (f"{MEMORY}::test_state_of_another_memory_format_is_refused",),
    ),
    Mutation(
        "masters that are taken with their chunks",
        "SpreadState.take",
        "        self.chunks[:] = [one for one in self.chunks if id(one[0]) not in taken]\n",
        "",
        (f"{MEMORY}::test_what_is_taken_of_spread_state_takes_its_chunks_along",),
    ),
    Mutation(
        "telling what hosts of several ranks cost",
        "say_what_hosts_cost",
        "    if own == 1 or options.all_reduces:\n",
        "    if own > 0:\n",
        ("tests/lightning/test_hosts.py",),
    ),
]
