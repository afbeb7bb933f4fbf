"""What weights and states that come in mid-run must not be mixed with."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

RESTORING = "tests/checkpoint/test_restoring.py"
FROZEN = "tests/exchange/test_frozen.py"
DROPPED = "tests/optimizers/test_dropped_masters.py"
NAMES = "tests/checkpoint/test_kept_names.py"

LOADING = [
    Mutation(
        "masters that begin with weights loaded without masters",
        "ShardedOptimizer._forget",
        "piece.parameter.copy_(cut_state(MASTER_KEY, parameter.detach(), parameter, piece))\n",
        "pass\n",
        (f"{RESTORING}::test_a_state_from_before_the_first_step_starts_anew",),
    ),
    Mutation(
        "forgetting that what was loaded has been stepped",
        "ShardedOptimizer._forget",
        "                piece.was_stepped = False\n",
        "",
        (f"{RESTORING}::test_a_state_from_before_the_first_step_starts_anew",),
    ),
    Mutation(
        "forgetting the lag of weights that diverged",
        "follow_weights",
        "    torch.where(is_move, moved, weights, out=master)\n",
        "    master.copy_(moved)\n",
        (f"{RESTORING}::test_weights_alone_come_back_from_a_divergence",),
    ),
    Mutation(
        "keeping the lag of weights that move a little",
        "follow_weights",
        "    torch.where(is_move, moved, weights, out=master)\n",
        "    master.copy_(weights)\n",
        (f"{RESTORING}::test_weights_that_shrink_at_every_step_keep_their_lag",),
    ),
    Mutation(
        "nothing that follows between parameters",
        "CodedBucket._write",
        "                differences = rows.view(-1).index_fill_(0, self._padding, 0.0)\n",
        "                differences = rows.view(-1)\n",
        ("tests/exchange/test_between_parameters.py",),
    ),
    Mutation(
        "holding what encoding left of what is frozen",
        "ResidualKeeper.put_in",
        "        self._held = None if others.is_of_nothing else others\n",
        "        self._held = None\n",
        (FROZEN,),
    ),
    Mutation(
        "weights that are what their masters were when their plan ends",
        "PlanLifecycle._leave_plan",
        "            self.present.sync_replicas()\n",
        "            pass\n",
        (f"{FROZEN}::test_what_leaves_a_plan_becomes_what_its_master_was",),
    ),
    Mutation(
        "masters that end with their plan",
        "PlanLifecycle.dissolve",
        "            left.take(MASTER_KEY, set(self.active.flat.lagging))\n",
        "",
        (f"{FROZEN}::test_what_is_written_between_two_plans_stays",),
    ),
    Mutation(
        "weights that count where a master was loaded for what is frozen",
        "PlanLifecycle.take_over",
        "AdoptedState(False, drop_masters(self._stepper.optimizer))",
        "AdoptedState(False, False)",
        (f"{FROZEN}::test_loaded_masters_of_what_is_frozen_are_dropped_and_weights_count",),
    ),
    Mutation(
        "weights that are what their masters were where they are frozen between two trainings",
        "PlanLifecycle._sync",
        "            parameter.copy_(self._stepper.optimizer.state[parameter].pop(MASTER_KEY))\n",
        "            self._stepper.optimizer.state[parameter].pop(MASTER_KEY)\n",
        (f"{FROZEN}::test_what_is_frozen_between_two_trainings_becomes_what_its_master_was",),
    ),
    Mutation(
        "leaving a refused state alone",
        "ResidualKeeper._on_loading",
        "        if list(map(len, saved)) != list(map(len, present)):\n",
        "        if False:\n",
        (f"{FROZEN}::test_a_state_that_torch_refuses_leaves_everything_as_it_was",),
    ),
    Mutation(
        "saying that masters of 16 bits are lost",
        "ShardedOptimizer._take_out",
        "            if not home.role.has_master or (was_loaded and not home.role.lags):\n",
        "            if not home.role.has_master:\n",
        (
            f"{DROPPED}::"
            "test_masters_of_16_bits_that_weights_lag_behind_are_lost_where_nothing_lags",
        ),
    ),
    Mutation(
        "counting anew after a load",
        "ResidualKeeper._overwrite",
        "            bucket.start_anew(own.seed)\n",
        "",
        (f"{RESTORING}::test_a_state_from_before_the_first_step_starts_anew",),
    ),
    Mutation(
        "what encoding left of what is frozen in folders",
        "ResidualKeeper.add_to_sharded",
        "self._common().joined((self._held or Residuals()).of(lambda one: one in numbers))\n",
        "self._common()\n",
        (f"{FROZEN}::test_nothing_is_lost_of_what_is_frozen_in_a_checkpoint_and_after_it",),
    ),
    Mutation(
        "saying that masters are dropped",
        "ShardedOptimizer._take_out",
        "                is_lost |= differs(master, parameter, is_rounded=home.role.has_master)\n",
        "                pass\n",
        (f"{DROPPED}::test_where_weights_lag_behind_them_rank_0_says_so_once",),
    ),
    Mutation(
        "saying that masters are dropped where whole tensors are stepped",
        "ReplicatedOptimizer.adopt_state",
        "masters.AdoptedState(False, masters.drop_masters(self.optimizer))",
        "masters.AdoptedState(False, masters.drop_masters(self.optimizer) and False)",
        (f"{DROPPED}::test_where_weights_lag_behind_them_rank_0_says_so_once",),
    ),
    Mutation(
        "loaded residuals on the parameters' device",
        "unpacked.copied",
        "as_flat(values, storage_strides(parameter)).to(parameter.device, copy=True)\n",
        "as_flat(values, storage_strides(parameter)).clone()\n",
        (f"{NAMES}::test_what_is_loaded_lies_where_its_parameter_does",),
    ),
]
