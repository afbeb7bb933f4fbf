"""True precisions set torch's default dtype around a training step, in which manual steps run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_dear.compression import Compressor, Int8, PowerSGD, RandomK, TopK
from tests.distributed.harness import distributed
from tests.lightning.fitting import WeightRecorder, assert_differ, assert_ranks_agree, dear, fit
from tests.lightning.nets import Net

SPARSE = (TopK(density=0.05, halves="reduce"), RandomK(density=0.1, halves="reduce"))
CASES: dict[str, tuple[Compressor, ...]] = {
    "bf16-true": (Int8(), *SPARSE),
    "64-true": (Int8(), *SPARSE, PowerSGD(rank=1, min_saving=1.0)),
}


class _Manual(Net):
    def __init__(self) -> None:
        super().__init__("mlp", "sgd")
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@pytest.mark.parametrize("precision", CASES)
@distributed(world_sizes=(2,))
def test_what_is_kept_is_fp32_under_manual_optimisation(precision: str) -> None:
    for codec in CASES[precision]:
        recorder, net, strategy = WeightRecorder(), _Manual(), dear(compressor=codec)
        fit(strategy, net, recorder, precision=precision)
        assert_ranks_agree(recorder.seen)
        assert_differ(recorder.seen[0], recorder.seen[-1])
        assert all(bool(weight.isfinite().all()) for weight in recorder.seen[-1])
        residuals = strategy._pipeline.parts[0].optimizer_state_dict()["residuals"]
        named = *residuals["worker"].values(), residuals["factors"]
        kept = [one for own in named for one in own.values()]
        assert kept
        assert {one.dtype for one in kept} == {torch.float32}, codec
