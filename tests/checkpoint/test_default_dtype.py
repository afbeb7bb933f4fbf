"""torch's default dtype, which Lightning sets around a training step, says nothing of residuals."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from lightning_dear.checkpoint.residuals import STEERING, Residuals
from lightning_dear.compression import (
    DGC,
    Compressor,
    Int8,
    LoCo,
    OkTopk,
    PowerSGD,
    RandomK,
    TopK,
)
from lightning_dear.strategy.connections import loss_scale
from tests.distributed.harness import distributed
from tests.exchange.test_coded import coded
from tests.training.linear import Run
from tests.training.models import weights

CODECS: tuple[Compressor, ...] = (
    Int8(block_size=64),
    LoCo(block_size=64),
    TopK(density=0.05),
    RandomK(density=0.1),
    DGC(density=0.05),
    PowerSGD(rank=1, min_saving=1.0),
    OkTopk(density=0.1),
)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _kept(residuals: Residuals) -> list[torch.Tensor]:
    kinds = [kind for kind in residuals.kept if kind != STEERING]
    return [one for kind in kinds for one in residuals.kept[kind].values()]


def _trained(codec: Compressor, dtype: torch.dtype) -> Run:
    """Five steps, the last two of a resumed run, each within `dtype`."""
    run, resumed = Run(coded(codec)), Run(coded(codec))
    with default_dtype(dtype):
        for _ in range(3):
            run.step()
        state = copy.deepcopy(run.part.optimizer_state_dict())
        resumed.resume(run)
        resumed.optimizer.load_state_dict(state)
        for _ in range(2):
            resumed.step()
        resumed.pipeline.complete_parameters()
    return resumed


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@distributed(world_sizes=(2,))
def test_training_is_the_same_within_any_default_dtype(dtype: torch.dtype) -> None:
    for codec in CODECS:
        expected, ours = _trained(codec, torch.float32), _trained(codec, dtype)
        for one, other in zip(weights(expected.model), weights(ours.model), strict=True):
            assert torch.equal(one, other), codec
        kept = _kept(ours.part.plans.residuals.taken())
        assert kept
        for one, other in zip(_kept(expected.part.plans.residuals.taken()), kept, strict=True):
            assert other.dtype == torch.float32, codec
            assert torch.equal(one, other), codec


def test_a_loss_scale_is_fp32_within_any_default_dtype() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16 + 2.0)
    with default_dtype(torch.float16):
        scale = loss_scale(scaler, torch.device("cpu"))
    assert scale.tolist() == [2.0**16 + 2.0]
