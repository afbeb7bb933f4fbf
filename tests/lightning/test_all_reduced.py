"""Fits whose plans have all-reduced buckets: as under DDP, checkpoints included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dear import DearStrategy
from tests.distributed.harness import distributed
from tests.engine.test_all_reduced import MIXED
from tests.lightning.fitting import STRATEGIES, assert_same, dear, fit
from tests.lightning.nets import Net, copies


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.5}], ids=["plain", "clipped"])
@distributed(world_sizes=(2,))
def test_the_weights_are_ddps(options: dict[str, Any]) -> None:
    nets = {name: Net("mlp", "adamw") for name in STRATEGIES}
    trainer = fit(dear(fusion=MIXED), nets["dear"], **options)
    strategy = trainer.strategy
    assert isinstance(strategy, DearStrategy)
    assert strategy.plan is not None
    assert strategy.plan.all_reduced
    fit(STRATEGIES["ddp"](), nets["ddp"], **options)
    if not options:
        assert_same(nets["dear"].losses, nets["ddp"].losses, "losses")
        assert_same(copies(nets["dear"]), copies(nets["ddp"]), "weights")
    for ours, theirs in zip(copies(nets["dear"]), copies(nets["ddp"]), strict=True):
        torch.testing.assert_close(ours, theirs)


@distributed(world_sizes=(2,))
def test_a_checkpoint_goes_on_under_other_strategies(tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    fit(dear(fusion=MIXED), Net("mlp", "adamw"), max_epochs=1).save_checkpoint(path)
    ended = []
    for strategy in (dear(fusion=MIXED), dear(), STRATEGIES["ddp"]()):
        net = Net("mlp", "adamw")
        fit(strategy, net, max_epochs=2, ckpt_path=path)
        ended.append(copies(net))
    for other in ended[1:]:
        assert_same(ended[0], other, "weights")
