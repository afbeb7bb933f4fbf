"""Whether rank 0 was told to end is known without a message of its own before every batch."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from tests.distributed.harness import distributed
from tests.lightning.fitting import dear, fit
from tests.lightning.nets import Net

asks = pytest.mark.skipif(
    not hasattr(_TrainingEpochLoop, "_broadcast_sigterm_tensor"),
    reason="this Lightning does not ask before every batch",
)


class _Hears(Callback):
    """Rank 0 is told to end in the third batch."""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 2 and dist.get_rank() == 0:
            trainer.strategy._pipeline.collectives.signal.ask = lambda: True


@asks
@distributed(world_sizes=(2,))
def test_all_ranks_ask_in_the_batch_after_rank_0_was_told() -> None:
    with mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcast:
        trainer = fit(dear(), Net("mlp"), _Hears())
    assert broadcast.call_count == 1 + trainer.global_step - 3


@asks
@distributed(world_sizes=(2,))
def test_only_the_first_batch_asks() -> None:
    with mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcast:
        trainer = fit(dear(), Net("mlp"))
    assert trainer.global_step > 3
    assert broadcast.call_count == 1
    assert "_broadcast_sigterm_tensor" not in vars(trainer.fit_loop.epoch_loop)
