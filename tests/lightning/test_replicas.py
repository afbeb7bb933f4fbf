"""Differences of parameters with a Trainer: it validates and saves what all ranks have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dear.callbacks import DearMonitor
from lightning_dear.compression import Bf16, Codec, Int4
from lightning_dear.planning import ThresholdFusion
from tests.distributed.harness import distributed
from tests.lightning.fitting import assert_ranks_agree, assert_same, dear, fit
from tests.lightning.nets import Net, copies
from tests.training.models import distance
from tests.training.wire import own_norm

LARGEST_LAG = {Int4(): 1e-2, Bf16(): 1e-3}


class AtTheEnd(Callback):
    """Saves, makes replicas equal to masters, and saves once more.

    Attributes:
        behind: The weights before that.
        equal: The weights after it.
        lag: Masters less weights on this rank, relative, where `DearMonitor` has read it last.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.behind: list[Tensor] = []
        self.equal: list[Tensor] = []
        self.lag = 0.0

    @override
    def on_before_zero_grad(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        part = trainer.strategy._pipeline.parts[0]
        if part.plan is not None:
            weights = list(pl_module.parameters())
            masters = _masters(part.optimizer_state_dict(), optimizer, weights)
            pairs = zip(masters, weights, strict=True)
            behind = [one.double() - other.detach() for one, other in pairs]
            self.lag = own_norm(part, weights, behind) / own_norm(part, weights, masters)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(self.folder / "behind.ckpt")
        self.behind = copies(pl_module)
        trainer.strategy.sync_replicas()
        self.equal = copies(pl_module)
        trainer.save_checkpoint(self.folder / "equal.ckpt")


def _masters(
    state: dict[str, Any], optimizer: Optimizer, weights: list[nn.Parameter]
) -> list[Tensor]:
    """Those of an optimizer's state dict, in the order of the weights."""
    in_groups = [id(one) for group in optimizer.param_groups for one in group["params"]]
    numbers = [in_groups.index(id(weight)) for weight in weights]
    return [state["state"][number]["master_weight"] for number in numbers]


@pytest.mark.parametrize("codec", LARGEST_LAG, ids=lambda codec: codec.name)
@distributed(world_sizes=(1, 2))
def test_replicas_are_validated_and_saved_beside_their_masters(
    tmp_path: Path, codec: Codec
) -> None:
    net, end = Net("mlp", "adamw"), AtTheEnd(tmp_path)
    fusion = ThresholdFusion(bucket_cap_mb=0.02, first_bucket_cap_mb=0.005)
    trainer = fit(
        dear(fusion=fusion, compressor=codec),
        net,
        DearMonitor(),
        end,
        validates=True,
        log_every_n_steps=1,
    )
    saved = {
        name: torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
        for name in ("behind", "equal")
    }
    behind, equal = (
        _masters(one["optimizer_states"][0], trainer.optimizers[0], list(net.parameters()))
        for one in saved.values()
    )
    assert_same(net.validated[-1], end.behind, "validated")
    assert_same(saved["behind"]["state_dict"].values(), end.behind, "saved")
    assert 0 < distance(end.behind, behind) <= LARGEST_LAG[codec]
    assert_same(equal, behind, "masters")
    assert_same(end.equal, behind, "made equal")
    assert_same(saved["equal"]["state_dict"].values(), behind, "saved once equal")
    assert_ranks_agree([end.behind, end.equal])
    logged = float(trainer.callback_metrics["dear/lag"])
    assert logged > 0
    assert logged == pytest.approx(end.lag, rel=1e-6, abs=0)
