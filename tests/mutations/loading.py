"""What weights and states that come in mid-run must not be mixed with."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

RESTORING = "tests/engine/test_restoring.py"
FROZEN = "tests/engine/test_frozen.py"
DROPPED = "tests/engine/test_dropped_masters.py"
NAMES = "tests/engine/test_kept_names.py"

LOADING = [
    Mutation(
        "masters that begin with weights loaded without masters",
        "sharded_optimizer.py",
        "                piece.parameter.copy_(weights)\n",
        "                pass\n",
        (f"{RESTORING}::test_a_state_from_before_the_first_step_starts_anew",),
    ),
    Mutation(
        "forgetting that what was loaded has been stepped",
        "sharded_optimizer.py",
        "                piece.was_stepped = False\n",
        "",
        (f"{RESTORING}::test_a_state_from_before_the_first_step_starts_anew",),
    ),
    Mutation(
        "forgetting the lag of weights that diverged",
        "bucket.py",
        "        torch.where(is_move, moved, replica, out=self.shard)\n",
        "        self.shard.copy_(moved)\n",
        (f"{RESTORING}::test_weights_alone_come_back_from_a_divergence",),
    ),
    Mutation(
        "keeping the lag of weights that move a little",
        "bucket.py",
        "        torch.where(is_move, moved, replica, out=self.shard)\n",
        "        self.shard.copy_(replica)\n",
        (f"{RESTORING}::test_weights_that_shrink_at_every_step_keep_their_lag",),
    ),
    Mutation(
        "nothing that follows between parameters",
        "exchange/coded_bucket.py",
        "            self.bucket.follow(rows.view(-1).index_fill_(0, self._padding, 0.0))\n",
        "            self.bucket.follow(rows.view(-1))\n",
        ("tests/engine/test_between_parameters.py",),
    ),
    Mutation(
        "holding what encoding left of what is frozen",
        "residual_keeper.py",
        "        self._held = None if others.is_of_nothing else others\n",
        "        self._held = None\n",
        (FROZEN,),
    ),
    Mutation(
        "what encoding left of what is frozen in folders",
        "residual_keeper.py",
        "        parts = chain(in_buckets, residuals.parts_held(held))\n",
        "        parts = chain(in_buckets)\n",
        (f"{FROZEN}::test_nothing_is_lost_of_what_is_frozen_in_a_checkpoint_and_after_it",),
    ),
    Mutation(
        "saying that masters are dropped",
        "sharded_optimizer.py",
        "            is_lost |= not has_master and differs(master, parameter)\n",
        "            pass\n",
        (f"{DROPPED}::test_where_weights_lag_behind_them_rank_0_says_so_once",),
    ),
    Mutation(
        "saying that masters are dropped where whole tensors are stepped",
        "replicated_optimizer.py",
        "            is_lost |= differs(own.pop(MASTER_KEY, None), parameter)\n",
        "            own.pop(MASTER_KEY, None)\n",
        (f"{DROPPED}::test_where_weights_lag_behind_them_rank_0_says_so_once",),
    ),
    Mutation(
        "reading a running mean by its old name",
        "checkpoint/residuals.py",
        '    is_signums = "residual" not in worker\n',
        "    is_signums = False\n",
        (f"{NAMES}::test_what_earlier_versions_called_momentum_is_read",),
    ),
    Mutation(
        "loaded residuals on the parameters' device",
        "checkpoint/residuals.py",
        "as_flat(numbers, storage_strides(parameter)).to(parameter.device)\n",
        "as_flat(numbers, storage_strides(parameter))\n",
        (f"{NAMES}::test_what_is_loaded_lies_where_its_parameter_does",),
    ),
]
