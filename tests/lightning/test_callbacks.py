"""Lightning's callbacks and tuner that change what is trained, or how, between two steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning, GradientAccumulationScheduler
from lightning.pytorch.tuner import Tuner
from torch import Tensor

from tests.distributed.harness import distributed
from tests.lightning.fitting import (
    STRATEGIES,
    WeightRecorder,
    assert_differ,
    assert_ranks_agree,
    assert_same,
    ddp,
    dear,
    fit,
    new_trainer,
    poison_until_waited,
)
from tests.lightning.nets import Net, copies, data


@distributed(world_sizes=[2])
def test_accumulation_that_changes_between_epochs() -> None:
    nets = {name: Net("gpt", "adamw") for name in STRATEGIES}
    recorders = {name: WeightRecorder() for name in STRATEGIES}
    for name, strategy in STRATEGIES.items():
        scheduler = GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})
        options = {"max_epochs": 3, "num_samples": 20}
        fit(strategy(), nets[name], scheduler, recorders[name], model="gpt", **options)
    assert_same(nets["dear"].losses, nets["ddp"].losses, "loss")
    assert_same(recorders["dear"].seen, recorders["ddp"].seen, "weights")


class _HeadNet(Net):
    """Its optimizer begins with the parameters that are not frozen."""

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9)


class _UnfreezeLater(BaseFinetuning):
    """The first two layers join in the second epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net.layers[:3], train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net.layers[:3], optimizer)


@distributed(world_sizes=[1, 2])
def test_unfreezing_in_the_second_epoch() -> None:
    """DDP never averages what it did not know at the start: here one device is the reference."""
    recorder = _fit_unfreezing(dear())
    per_epoch = len(recorder.seen) // 2
    start, before, after = recorder.seen[0], recorder.seen[per_epoch - 1], recorder.seen[-1]
    assert_same(before[:4], start[:4], "frozen weights")
    assert_differ(before[4:], start[4:])
    for tensor, earlier in zip(after, before, strict=True):
        assert not torch.equal(tensor, earlier)
    assert_ranks_agree(recorder.seen)
    if dist.get_world_size() == 1:
        assert_same(recorder.seen, _fit_unfreezing("auto").seen, "weights")


def _fit_unfreezing(strategy: Any) -> WeightRecorder:
    recorder = WeightRecorder()
    options = {"max_epochs": 2, "use_distributed_sampler": False}
    fit(strategy, _HeadNet(), _UnfreezeLater(), recorder, **options)
    return recorder


class _RateNet(Net):
    def __init__(self) -> None:
        super().__init__("mlp", "adamw")
        self.lr = 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


@distributed(world_sizes=[2])
def test_lr_find_then_fit() -> None:
    found, seen = {}, {}
    for name, strategy in {"ddp": ddp, "dear": dear}.items():
        torch.manual_seed(0)
        net, recorder = _RateNet(), WeightRecorder()
        trainer = new_trainer(strategy(), recorder, enable_progress_bar=False)
        loader = data("mlp", 64)
        before = copies(net)
        with poison_until_waited():
            finder = Tuner(trainer).lr_find(
                net, loader, num_training=12, update_attr=False, early_stop_threshold=None
            )
            assert_same(copies(net), before, "weights after the search")
            trainer.fit(net, loader)
        found[name], seen[name] = finder.results["loss"], recorder.seen
    assert found["dear"] == found["ddp"]
    assert_same(seen["dear"], seen["ddp"], "weights")


class _GatheringNet(Net):
    """Uses the default process group in the middle of a step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        everyone = self.all_gather(loss.detach())
        self.log("loss", loss, sync_dist=True)
        self.losses.append(everyone.clone())
        return loss


@distributed(world_sizes=[2])
def test_collectives_of_the_user() -> None:
    nets = {name: _GatheringNet("gpt") for name in STRATEGIES}
    for name, strategy in STRATEGIES.items():
        fit(strategy(), nets[name], model="gpt")
    assert_same(nets["dear"].losses, nets["ddp"].losses, "gathered losses")
    assert_same(copies(nets["dear"]), copies(nets["ddp"]), "weights after fit")
