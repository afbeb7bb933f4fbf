"""Every hook in which a callback may read weights through references that no gate sees."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from typing_extensions import override

from lightning_dear.callbacks import DearMonitor, TimelineCallback
from lightning_dear.callbacks.fusion_tuner import FusionTuner
from lightning_dear.callbacks.guards import CompletionGuard
from lightning_dear.planning import AutoFusion
from tests.distributed.harness import distributed
from tests.lightning.fitting import STRATEGIES, assert_same, dear, fit
from tests.lightning.nets import Net

HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_end",
    "on_validation_start",
    "on_save_checkpoint",
)


@dataclass
class _HeldListReader(Callback):
    """Reads in one hook alone, so that no other wait stands in for the one it needs."""

    hook: str
    held: list[nn.Parameter] = field(default_factory=list)
    seen: list[list[Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        setattr(self, self.hook, self._read)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.held = list(pl_module.parameters())

    def _read(self, *_: Any) -> None:
        self.seen.append([parameter.detach().clone() for parameter in self.held])


@pytest.mark.parametrize("hook", HOOKS)
@distributed(world_sizes=(2,))
def test_a_held_list_is_read_in_one_hook(hook: str, tmp_path: Any) -> None:
    readers = {name: _HeldListReader(hook) for name in STRATEGIES}
    for name, strategy in STRATEGIES.items():
        fit(
            strategy(),
            Net("mlp"),
            readers[name],
            max_epochs=2,
            validates=hook == "on_validation_start",
            enable_checkpointing=True,
            default_root_dir=tmp_path / name,
        )
    assert readers["dear"].seen
    assert_same(readers["dear"].seen, readers["ddp"].seen, hook)


@pytest.mark.parametrize(
    ("method", "host_method", "args"),
    [
        ("validation_step", "validation_step", ("batch", 0)),
        ("lightning_module_state_dict", "lightning_module_state_dict", ()),
        ("load_model_state_dict", "load_model_state_dict", ({}, True)),
    ],
)
def test_the_strategy_waits_itself(method: str, host_method: str, args: tuple[Any, ...]) -> None:
    """The learning rate finder takes the trainer's callbacks away meanwhile, the guard too."""
    strategy, calls = dear(), list[str]()
    strategy.complete_parameters = lambda reason: calls.append("wait")
    read = mock.Mock(side_effect=lambda *_: calls.append("read"))
    with mock.patch.object(DDPStrategy, host_method, read):
        getattr(strategy, method)(*args)
    assert calls == ["wait", "read"]


class _Reader(Callback):
    """Overrides every hook of a batch, so that the guard has somebody to wait for."""

    def on_train_batch_start(self, *_: Any) -> None:
        """Would read."""

    def on_train_batch_end(self, *_: Any) -> None:
        """Would read."""


@pytest.mark.parametrize("hook", HOOKS)
def test_the_guard_waits_in_every_hook(hook: str) -> None:
    """Also where this Lightning happens to read all parameters just before, and others may not."""
    reasons: list[str] = []
    guard = CompletionGuard(reasons.append)
    trainer = mock.Mock(callbacks=[guard, _Reader()])
    arguments = {"on_train_batch_start": (None, 0), "on_train_batch_end": (None, None, 0)}
    more = arguments.get(hook, ({},) if hook == "on_save_checkpoint" else ())
    getattr(guard, hook)(trainer, LightningModule(), *more)
    assert len(reasons) == 1
    assert hook in reasons[0]


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end", "on_train_end"])
def test_callbacks_of_ours_make_nobody_wait(hook: str) -> None:
    reasons: list[str] = []
    guard = CompletionGuard(reasons.append)
    ours = [DearMonitor(), TimelineCallback(), FusionTuner(AutoFusion())]
    assert guard.reader_of(hook, [guard, *ours, LightningModule()]) is None
