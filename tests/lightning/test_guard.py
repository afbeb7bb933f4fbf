"""Every hook in which a callback may read weights through references that no gate sees."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from typing_extensions import override

from tests.distributed.harness import distributed
from tests.lightning.fitting import STRATEGIES, assert_same, fit
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
            validates=True,
            enable_checkpointing=True,
            default_root_dir=tmp_path / name,
        )
    assert readers["dear"].seen
    assert_same(readers["dear"].seen, readers["ddp"].seen, hook)
