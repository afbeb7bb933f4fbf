"""Optimizer state: every rank keeps 1/world_size of what it keeps under DDP."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn

from lightning_dear.optimizers.sharded import ShardedOptimizer
from tests.distributed.harness import distributed
from tests.lightning.fitting import STRATEGIES, fit
from tests.lightning.nets import Net


class _WideNet(Net):
    """Large enough that padding to whole shards hardly counts."""

    def __init__(self) -> None:
        super().__init__("mlp", "adamw")
        self.net = nn.Sequential(
            nn.Linear(7, 400), nn.ReLU(), nn.Linear(400, 300), nn.Linear(300, 3)
        )


class _StateBytes(Callback):
    """Counts the bytes of AdamW's averages behind the last step, while the fit still runs."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_user_bytes = 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        optimizer = trainer.optimizers[0]
        state = getattr(optimizer.state, "plain", optimizer.state)
        self.num_user_bytes = _count(state.values())
        self.num_bytes = self.num_user_bytes
        pipeline = getattr(trainer.strategy, "_pipeline", None)
        if pipeline is not None:
            sharded: ShardedOptimizer = pipeline.parts[0].stepper
            self.num_bytes += _count(sharded.state_of(piece) for piece in sharded.pieces)


def _count(states: Iterable[Any]) -> int:
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for state in states
        for value in state.values()
        if isinstance(value, Tensor) and value.numel() > 1
    }
    return sum(storages.values())


@distributed(world_sizes=[2, 4])
def test_adamw_state_is_divided_by_the_world_size() -> None:
    counted = {name: _StateBytes() for name in STRATEGIES}
    for name, strategy in STRATEGIES.items():
        fit(strategy(), _WideNet(), counted[name], limit_train_batches=2)
    whole, world_size = counted["ddp"].num_bytes, dist.get_world_size()
    assert whole == 2 * sum(p.nbytes for p in _WideNet().parameters())
    own = torch.tensor([counted["dear"].num_bytes])
    mine = own.item()
    dist.all_reduce(own)
    assert own.item() == whole, "all ranks' shards together are the state, once"
    assert mine <= 1.03 * whole / world_size
    assert counted["dear"].num_user_bytes == 0
