"""Every wait, flush and guard of the package, and who notices that it is gone."""

from __future__ import annotations

from tests.mutations.all_reduced import ALL_REDUCED
from tests.mutations.batch_weights import BATCH_WEIGHTS
from tests.mutations.between_steps import BETWEEN_STEPS
from tests.mutations.buffers import BUFFERS
from tests.mutations.codec_plans import CODEC_PLANS
from tests.mutations.codecs import CODECS
from tests.mutations.coded import CODED
from tests.mutations.comparing import COMPARING
from tests.mutations.devices import DEVICES
from tests.mutations.doctor import DOCTORS
from tests.mutations.gathering import GATHERING
from tests.mutations.hooks import HOOKS
from tests.mutations.kept import KEPT
from tests.mutations.launches import LAUNCHES
from tests.mutations.loaders import LOADERS
from tests.mutations.loading import LOADING
from tests.mutations.local_state import LOCAL_STATE
from tests.mutations.local_steps import LOCAL_STEPS
from tests.mutations.low_rank import LOW_RANK
from tests.mutations.mutation import Mutation, row
from tests.mutations.rounds import ROUNDS
from tests.mutations.seeds import SEEDS
from tests.mutations.shares import SHARES
from tests.mutations.sparse_sums import SPARSE_SUMS
from tests.mutations.speed import SPEED
from tests.mutations.splits import SPLITS
from tests.mutations.staged import STAGED
from tests.mutations.starting import STARTING
from tests.mutations.steps import FLUSHES, GUARDS, WAITS
from tests.mutations.streams import STREAMS
from tests.mutations.two_hops import TWO_HOPS
from tests.mutations.unheld import UNHELD

STATE = "tests/optimizers/test_state.py"


STRATEGY = [
    Mutation(
        "completing before validation_step",
        "DearStrategy.validation_step",
        '        self.complete_parameters("validation_step")\n',
        "",
        ("tests/callbacks/test_guard.py::test_the_strategy_waits_itself",),
    ),
    Mutation(
        "completing before a state_dict",
        "DearStrategy.lightning_module_state_dict",
        '            self.complete_parameters("state_dict")\n',
        "            pass\n",
        ("tests/callbacks/test_guard.py::test_the_strategy_waits_itself",),
    ),
    Mutation(
        "completing before load_state_dict",
        "DearStrategy.load_model_state_dict",
        '        self.complete_parameters("load_state_dict")\n',
        "",
        ("tests/callbacks/test_guard.py::test_the_strategy_waits_itself",),
    ),
    Mutation(
        "not sending while accumulating",
        "DearStrategy.backward",
        "        synchronize = not self._is_sync_blocked and is_last",
        "        synchronize = is_last",
        (f"{STATE}::test_accumulated_gradients_are_those_of_ddp", *row("accumulation")),
    ),
    Mutation(
        "ending gloo's groups with the job",
        "collectives.factory:",
        "atexit.register(end_process_groups)\n",
        "atexit.register(forget_process_groups)\n",
        ("tests/distributed/test_ending.py",),
    ),
    Mutation(
        "whole optimizer state in checkpoints",
        "DearStrategy.optimizer_state",
        "self._pipeline.of(optimizer).optimizer_state_dict(on_rank_0=not on_all_ranks)\n",
        "super().optimizer_state(optimizer)\n",
        ("tests/lightning/test_checkpoints.py",),
    ),
    Mutation(
        "clipping and unscaling on shards",
        "DearStrategy._connect",
        "            connections.connect_precision(self.precision_plugin, pipeline)\n",
        "",
        row("clipping by norm", "clipping by value"),
    ),
    Mutation(
        "gradients for hooks after backward",
        "CompletionGuard.on_after_backward",
        "            self.expose(None)\n",
        "            pass\n",
        ("tests/callbacks/test_gradient_access.py",),
    ),
    Mutation(
        "gradients for hooks before the step",
        "CompletionGuard.on_before_optimizer_step",
        "            self.expose(optimizer)\n",
        "            pass\n",
        ("tests/callbacks/test_gradient_access.py",),
    ),
]


def _guard_hook(hook: str, is_conditional: bool, *rows: str) -> Mutation:
    readers = ", for_readers=True" if is_conditional else ""
    return Mutation(
        f"completing before callbacks' {hook}",
        f"CompletionGuard.{hook}",
        f'    {hook} = _completing("{hook}"{readers})\n',
        "    pass\n",
        (*row(*rows), "tests/callbacks/test_guard.py::test_the_guard_waits_in_every_hook"),
    )


CALLBACKS = [
    _guard_hook(
        "on_train_batch_start", True, "a held list read in the module's own on_train_batch_start"
    ),
    Mutation(
        "completing before callbacks' on_train_batch_end",
        "CompletionGuard.on_train_batch_end",
        "        self._behind_batch(trainer, pl_module)\n",
        "",
        row("a callback with a list of parameters kept since on_fit_start"),
    ),
    _guard_hook("on_train_epoch_start", False),
    _guard_hook("on_train_epoch_end", False),
    _guard_hook("on_train_end", False),
    _guard_hook("on_validation_start", False),
    _guard_hook("on_save_checkpoint", False),
]

MUTATIONS = [
    *WAITS,
    *GUARDS,
    *FLUSHES,
    *HOOKS,
    *STRATEGY,
    *CALLBACKS,
    *SPARSE_SUMS,
    *SHARES,
    *SPEED,
    *SPLITS,
    *DEVICES,
    *DOCTORS,
    *GATHERING,
    *ALL_REDUCED,
    *BATCH_WEIGHTS,
    *BETWEEN_STEPS,
    *CODECS,
    *CODED,
    *KEPT,
    *LOW_RANK,
    *LAUNCHES,
    *LOADERS,
    *LOADING,
    *LOCAL_STATE,
    *LOCAL_STEPS,
    *CODEC_PLANS,
    *COMPARING,
    *ROUNDS,
    *SEEDS,
    *STREAMS,
    *STAGED,
    *STARTING,
    *TWO_HOPS,
    *BUFFERS,
    *UNHELD,
]
