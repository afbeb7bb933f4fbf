"""Every wait, flush and guard of the package, and who notices that it is gone."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

READING = "tests/engine/test_reading.py"
GRADIENTS = "tests/engine/test_gradients.py"
CONTRACT = "tests/engine/test_optimizer_contract.py"
STATE = "tests/engine/test_state.py"
PARITY = "tests/engine/test_parity.py"
DELAYS = "tests/engine/test_delays.py"
MASTERS = "tests/engine/test_masters.py"


def row(*names: str) -> tuple[str, ...]:
    """Rows of the parity matrix, at two ranks with SGD."""
    ids = [f"tests/lightning/matrix/test_matrix.py::test_row[{name}-sgd-2]" for name in names]
    return tuple(ids)


WAITS = [
    Mutation(
        "waiting for a gathered bucket",
        "gatherer.py",
        "        with self._waiting(reason):\n            work.wait()\n",
        "        with self._waiting(reason):\n            pass\n",
        (DELAYS,),
    ),
    Mutation(
        "waiting for reduced buckets",
        "reducer.py",
        "                one.wait()\n",
        "                pass\n",
        (DELAYS,),
    ),
    Mutation(
        "closing gates",
        "gatherer.py",
        "                close_gate(module, self, partial(",
        "                (lambda *_: None)(module, self, partial(",
        (READING, *row("functional use (F.linear with a layer's weight)")),
    ),
    Mutation(
        "waiting before a module's forward",
        "gatherer.py",
        "        if not self._gatherer.is_idle:\n",
        "        if False:\n",
        row("recurrent layers (GRU)", "weights read through a held list"),
    ),
    Mutation(
        "waiting for what is read outside any module",
        "gatherer.py",
        '        self.complete(self._entry, "training_step")\n',
        "        pass\n",
        (READING,),
    ),
    Mutation(
        "waiting for it again after a step in mid-forward",
        "pipeline.py",
        "        if self._is_in_forward:\n",
        "        if False:\n",
        (READING,),
    ),
    Mutation(
        "waiting for all in front of a compiled region",
        "optimizer_pipeline.py",
        '            self._active.gatherer.complete(reason="compiled region")\n',
        "            pass\n",
        (READING,),
    ),
    Mutation(
        "waiting for module buffers",
        "module_buffers.py",
        "            work.wait()\n",
        "",
        (STATE, *row("BatchNorm buffers", "BatchNorm in validation")),
    ),
    Mutation(
        "completing parameters before the step",
        "optimizer_pipeline.py",
        '        self.complete_parameters("step")\n',
        "",
        (READING,),
    ),
    Mutation(
        "completing parameters before others' step hooks",
        "optimizer_pipeline.py",
        '            self.complete_parameters("optimizer step hook")\n',
        "            pass\n",
        (CONTRACT,),
    ),
    Mutation(
        "completing parameters before a new plan",
        "optimizer_pipeline.py",
        '        self.complete_parameters("re-plan")\n',
        "",
        (STATE, CONTRACT, *row("BackboneFinetuning")),
    ),
    Mutation(
        "completing parameters at the end",
        "pipeline.py",
        '            self.complete_parameters("teardown")\n',
        "            pass\n",
        (DELAYS, *row("accumulation")),
    ),
]

GUARDS = [
    Mutation(
        "bumping versions",
        "gatherer.py",
        "        torch.autograd.graph.increment_version(self._parameters_of[number])\n",
        "",
        (READING,),
    ),
    Mutation(
        "refusing a gradient of a pending parameter",
        "optimizer_pipeline.py",
        "            self._active.reducer.check_was_complete(index)\n",
        "            pass\n",
        (READING,),
    ),
    Mutation(
        "the audit",
        "audit.py",
        "        if any(active.gatherer.is_pending(number) for number in buckets):\n",
        "        if False:\n",
        (READING,),
    ),
    Mutation(
        "refusing what no rank could know of",
        "reducer.py",
        "        if self._num_rounds or self._collectives.reads_flags_freely:\n",
        "        if True:\n",
        (READING,),
    ),
    Mutation(
        "zeros for parameters without a gradient",
        "reducer.py",
        "                placement.gradient.zero_()\n",
        "                pass\n",
        (STATE, *row("parameters unused on some ranks")),
    ),
    Mutation(
        "counting gradients before a launch",
        "reducer.py",
        "        if self._num_calls[index] >= self._expected[index]:\n",
        "        if True:\n",
        (PARITY, "-k", "reentrant or odd"),
    ),
    Mutation(
        "leaving late gradients to another round",
        "reducer.py",
        "        return _LATE in said_by_any\n",
        "        return False\n",
        (GRADIENTS,),
    ),
    Mutation(
        "adding up rounds",
        "reducer.py",
        "            bucket.mean.add_(earlier)\n",
        "            pass\n",
        (GRADIENTS,),
    ),
    Mutation(
        "asking all ranks for new gradients",
        "optimizer_pipeline.py",
        "        self.reduce(votes=True)\n",
        "        self.reduce()\n",
        (GRADIENTS,),
    ),
    Mutation(
        "the vote on an overflow",
        "gradients.py",
        "    collectives.launch_any(flag).wait()\n    return flag\n",
        "    return flag\n",
        (GRADIENTS,),
    ),
    Mutation(
        "unused parameters stay unused",
        "sharded_optimizer.py",
        "            if not used[piece.tensor_index]:\n",
        "            if False:\n",
        (STATE,),
    ),
    Mutation(
        "refusing parameters that are new between forward and step",
        "optimizer_pipeline.py",
        "        if self._trained.have_grown():\n            raise",
        "        if False:\n            raise",
        (STATE, CONTRACT),
    ),
    Mutation(
        "a new plan for new parameters",
        "optimizer_pipeline.py",
        "        if self._trained.have_grown():\n            self._dissolve()\n",
        "",
        (STATE,),
    ),
    Mutation(
        "a closure that was not called",
        "sharded_optimizer.py",
        "        if self._selected is None:\n            raise",
        "        if False:\n            raise",
        (CONTRACT,),
    ),
    Mutation(
        "numbers of their own for a second optimizer's buckets",
        "active_plan.py",
        "DenseExchange(collectives, first_number)",
        "DenseExchange(collectives, 0)",
        (GRADIENTS,),
    ),
]

FLUSHES = [
    Mutation(
        "ending what was begun before gradients are dropped",
        "optimizer_pipeline.py",
        "                self._active.reducer.reduce()\n",
        "                pass\n",
        (CONTRACT,),
    ),
    Mutation(
        "forgetting dropped gradients",
        "optimizer_pipeline.py",
        "            self._active.reducer.reset()\n            self.sharded.clear_gradients()\n",
        "            pass\n",
        (GRADIENTS,),
    ),
    Mutation(
        "taking exposed gradients back",
        "optimizer_pipeline.py",
        "                self._conceal()\n",
        "                pass\n",
        (GRADIENTS,),
    ),
    Mutation(
        "taking over data put in place of a parameter's",
        "active_plan.py",
        "                placement.adopt_replacement()\n",
        "                pass\n",
        (READING,),
    ),
    Mutation(
        "taking over writes to 16-bit parameters",
        "active_plan.py",
        "            bucket.adopt_writes()\n",
        "            pass\n",
        (MASTERS,),
    ),
    Mutation(
        "rounding masters into parameters",
        "exchange/dense.py",
        "        bucket.publish()\n",
        "",
        (MASTERS,),
    ),
    Mutation(
        "masters in saved state",
        "sharded_optimizer.py",
        "            return {**state, MASTER_KEY: piece.parameter}\n",
        "            return state\n",
        (MASTERS,),
    ),
    Mutation(
        "state as it was loaded, not cast to 16 bits",
        "sharded_optimizer.py",
        "            if parameter.dtype not in LOW_PRECISION:\n",
        "            if True:\n",
        (MASTERS,),
    ),
    Mutation(
        "taking over loaded state",
        "optimizer_pipeline.py",
        "        self._active.adopt_writes()\n        self.sharded.adopt_state()\n",
        "        self._active.adopt_writes()\n",
        (STATE, CONTRACT),
    ),
    Mutation(
        "putting assigned parameters back",
        "optimizer_pipeline.py",
        "        self._trained.restore_replaced()\n",
        "",
        (READING,),
    ),
    Mutation(
        "the users' groups after a step that raised",
        "sharded_optimizer.py",
        "    def _begin(self) -> None:\n        self.restore()\n",
        "    def _begin(self) -> None:\n",
        (CONTRACT,),
    ),
]

STRATEGY = [
    Mutation(
        "completing before validation_step",
        "strategy.py",
        '        self.complete_parameters("validation_step")\n',
        "",
        row("a held list read in validation_step"),
    ),
    Mutation(
        "completing before a state_dict",
        "strategy.py",
        '            self.complete_parameters("state_dict")\n',
        "            pass\n",
        row("ModelCheckpoint every n steps", "state_dict() between steps"),
    ),
    Mutation(
        "completing before load_state_dict",
        "strategy.py",
        '        self.complete_parameters("load_state_dict")\n',
        "",
        row("lr_find, then fit", "load_state_dict between steps"),
    ),
    Mutation(
        "not sending while accumulating",
        "strategy.py",
        "        synchronize = is_last and not self._is_sync_blocked\n",
        "        synchronize = is_last\n",
        (STATE, "tests/lightning/test_sharding.py", *row("accumulation")),
    ),
    Mutation(
        "whole optimizer state in checkpoints",
        "strategy.py",
        "        return self._pipeline.of(optimizer).optimizer_state_dict()\n",
        "        return super().optimizer_state(optimizer)\n",
        ("tests/lightning/test_checkpoints.py",),
    ),
    Mutation(
        "clipping and unscaling on shards",
        "strategy.py",
        "        connect_precision(self.precision_plugin, self._pipeline)\n",
        "",
        row("clipping by norm", "clipping by value"),
    ),
    Mutation(
        "gradients for hooks after backward",
        "callbacks/gradient_guard.py",
        "            self._expose(None)\n",
        "            pass\n",
        ("tests/lightning/test_gradient_access.py",),
    ),
    Mutation(
        "gradients for hooks before the step",
        "callbacks/gradient_guard.py",
        "            self._expose(optimizer)\n",
        "            pass\n",
        ("tests/lightning/test_gradient_access.py",),
    ),
]


def _guard_hook(hook: str, is_conditional: bool, *rows: str) -> Mutation:
    call = f'_before("{hook}", trainer, pl_module)' if is_conditional else f'_complete("{hook}")'
    return Mutation(
        f"completing before callbacks' {hook}",
        "callbacks/completion_guard.py",
        f"        self.{call}\n",
        "        pass\n",
        (*row(*rows), "tests/lightning/test_guard.py"),
    )


CALLBACKS = [
    _guard_hook(
        "on_train_batch_start", True, "a held list read in the module's own on_train_batch_start"
    ),
    _guard_hook(
        "on_train_batch_end", True, "a callback with a list of parameters kept since on_fit_start"
    ),
    _guard_hook("on_train_epoch_start", False),
    _guard_hook("on_train_epoch_end", False),
    _guard_hook("on_train_end", False),
    _guard_hook("on_validation_start", False),
    _guard_hook("on_save_checkpoint", False),
]

MUTATIONS = [*WAITS, *GUARDS, *FLUSHES, *STRATEGY, *CALLBACKS]
