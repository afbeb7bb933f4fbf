"""Rows: the trainer's precisions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.nn.utils import clip_grad_value_

from tests.distributed.rank import RANKS_A_HOST
from tests.lightning.matrix.gradients import CLIP, GATHERED
from tests.lightning.matrix.manual import Gan, ManualPlain
from tests.lightning.matrix.nets import RowNet, conv, gpt, mlp
from tests.lightning.matrix.rows import MOST, NORM_ORDER, SUM_ORDER, THREE_RANKS, Apart, Feature
from tests.lightning.matrix.seen import Seen

OVERFLOW_STEP = 2
row = partial(Feature, section="Precision")
AT_THREE_RANKS = Apart(SUM_ORDER.reason, THREE_RANKS, MOST)


def _grad_scaler() -> Sequence[Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    return [MixedPrecision("16-mixed", "cpu", scaler)]


class _Overflowing(RowNet):
    """One element of one gradient is infinite, in one step, on the last rank alone."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        is_last = self.trainer.global_rank == self.trainer.world_size - 1
        if batch_idx == OVERFLOW_STEP and is_last:
            loss = loss + self.net.layers[2].bias[0] * float("inf")
        return loss


def _skipped(seen: Seen) -> None:
    """The step with the overflow changed nothing but the scale."""
    before, at = seen.series["weights"][OVERFLOW_STEP - 1 : OVERFLOW_STEP + 1]
    assert all(map(torch.equal, before, at))
    scales = [float(scale) for (scale,) in seen.series["scale"]]
    assert scales[OVERFLOW_STEP] == scales[OVERFLOW_STEP - 1] / 2
    assert scales[-1] > scales[OVERFLOW_STEP]


def _grown(seen: Seen) -> None:
    scales = [float(scale) for (scale,) in seen.series["scale"]]
    assert scales[-1] > scales[0]


class _Masters(RowNet):
    """Reference for 16-bit weights: float32 copies take the steps, and are rounded.

    Every rank has the gradients of all; they are scaled by 1/P in 16 bits, as they travel, and
    summed in float32 by rank.
    """

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        with self.trainer.strategy.block_backward_sync():
            optimizer_closure()
        optimizer = optimizer.optimizer
        if not hasattr(self, "masters"):
            self.masters = {
                parameter: parameter.detach().float() for parameter in self.parameters()
            }
        lists = [group["params"] for group in optimizer.param_groups]
        for parameter, master in self.masters.items():
            master.grad = _mean(parameter.grad)
        for group in optimizer.param_groups:
            group["params"] = [self.masters[parameter] for parameter in group["params"]]
        optimizer.step()
        for group, parameters in zip(optimizer.param_groups, lists, strict=True):
            group["params"] = parameters
        with torch.no_grad():
            for parameter, master in self.masters.items():
                parameter.copy_(master)


class _HookedStep(RowNet):
    """With a GradScaler the closure comes before the optimizer's step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(self._clip)
        return optimizer

    def _clip(self, *_: Any) -> None:
        self.note("gradients", [one.grad for one in self.parameters()])
        clip_grad_value_(self.parameters(), CLIP)


def _mean(gradient: Tensor) -> Tensor:
    world_size = int(os.environ["WORLD_SIZE"])
    scaled = gradient * (1 / world_size)
    everyone = [torch.empty_like(scaled) for _ in range(world_size)]
    dist.all_gather(everyone, scaled)
    if RANKS_A_HOST in os.environ:
        # A host's sum is rounded once, to what travels between hosts.
        size = int(os.environ[RANKS_A_HOST])
        hosts = [everyone[first : first + size] for first in range(0, world_size, size)]
        everyone = [_sum(ranks).to(scaled.dtype) for ranks in hosts]
    return _sum(everyone)


def _sum(tensors: list[Tensor]) -> Tensor:
    total = tensors[0].float()
    for other in tensors[1:]:
        total += other.float()
    return total


def _is_half(seen: Seen, dtype: torch.dtype) -> None:
    assert {tensor.dtype for tensor in seen.series["weights"][0]} == {dtype}


FEATURES = (
    row(name="precision 32-true", net=gpt, data="gpt", apart=(AT_THREE_RANKS,)),
    row(name="precision 64-true", net=conv, data="conv", trainer={"precision": "64-true"}),
    row(
        name="precision bf16-mixed",
        net=mlp,
        trainer={"precision": "bf16-mixed"},
        apart=(AT_THREE_RANKS,),
    ),
    row(
        name="precision 16-mixed with GradScaler",
        net=mlp,
        plugins=_grad_scaler,
        check=_grown,
        apart=(AT_THREE_RANKS,),
    ),
    row(
        name="GradScaler with an overflow on one rank",
        net=_Overflowing,
        plugins=_grad_scaler,
        check=_skipped,
        apart=(AT_THREE_RANKS,),
        remark="all ranks skip the step",
    ),
    row(
        name="GradScaler and clipping by norm",
        net=mlp,
        plugins=_grad_scaler,
        trainer={"gradient_clip_val": CLIP},
        apart=(NORM_ORDER, AT_THREE_RANKS),
    ),
    row(
        name="GradScaler and a step's pre-hook that clips",
        net=_HookedStep,
        plugins=_grad_scaler,
        apart=(AT_THREE_RANKS,),
        remark=GATHERED,
    ),
    row(
        name="GradScaler and accumulation",
        net=mlp,
        plugins=_grad_scaler,
        trainer={"accumulate_grad_batches": 2},
        apart=(AT_THREE_RANKS,),
    ),
    row(
        name="GradScaler in manual optimisation",
        net=ManualPlain,
        plugins=_grad_scaler,
        apart=(AT_THREE_RANKS,),
    ),
    row(
        name="GradScaler with two optimizers (GAN)",
        net=Gan,
        reference="ddp, unused",
        plugins=_grad_scaler,
        apart=(AT_THREE_RANKS,),
    ),
    row(
        name="precision bf16-true",
        net=mlp,
        trainer={"precision": "bf16-true"},
        reference_net=_Masters,
        check=partial(_is_half, dtype=torch.bfloat16),
        remark="compared with float32 weights; DDP steps 16-bit ones and loses small updates",
    ),
    row(
        name="precision 16-true",
        net=mlp,
        trainer={"precision": "16-true"},
        reference_net=_Masters,
        check=partial(_is_half, dtype=torch.float16),
        remark="as bf16-true; gradients can underflow, so prefer 16-mixed",
    ),
)
