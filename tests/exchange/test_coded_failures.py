"""Encoded exchanges and gradients that are not finite, or that belong to nobody."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dear.compression import (
    DGC,
    QSGD,
    Bf16,
    Codec,
    EFSignSGD,
    Fp16,
    Int4,
    Int8,
    LoCo,
    OkTopk,
    RandomK,
    SignSGD,
    Signum,
    TopK,
)
from lightning_dear.engine.trained_parameters import check_momentum
from lightning_dear.exchange.coded_bucket import CodedBucket
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import (
    AutoFusion,
    BayesianFusion,
    FusionPlanner,
    MergeCompFusion,
    MergeCompHeuristicFusion,
    MGWFBPFusion,
    NoFusion,
)
from lightning_dear.strategy.refusals import check_planner
from tests.distributed.harness import distributed
from tests.training.lagging import LaggingTopK
from tests.training.linear import Run, gradients_of
from tests.training.models import weights

CODECS = (
    Int8(),
    EFSignSGD(),
    TopK(density=0.05),
    SignSGD(),
    QSGD(),
    Int8(halves="reduce"),
    Bf16(),
    RandomK(density=0.1, decay=1.0),
)

WITHOUT_FEEDBACK: dict[str, Any] = {"error_feedback": False}


def _backward_of_inf(run: Run, value: float) -> None:
    gradients = gradients_of(50, dist.get_rank())
    if dist.get_rank() == dist.get_world_size() - 1:
        first = gradients[0]
        assert first is not None
        first[3, 4] = value
    with run.pipeline.forward():
        loss = run.model(gradients)
    with run.pipeline.backward():
        loss.backward()


def _kept(run: Run) -> dict[str, list[Tensor]]:
    held = run.part.plans.residuals.taken()
    return {
        f"{kind} {name}": [tensor.clone() for tensor in own.values()]
        for (kind, name), own in held.kept.items()
        if kind in ("worker", "owner")
    }


def _assert_kept(run: Run, before: dict[str, list[Tensor]]) -> None:
    after = _kept(run)
    assert after.keys() == before.keys()
    for name, kept in before.items():
        for old, new in zip(kept, after[name], strict=True):
            assert torch.equal(old, new), name


def _assert_refused(codec: Codec, spoil: Callable[[Run], None], message: str) -> None:
    """A step after `spoil` raises and changes nothing, and training goes on."""
    run = Run(ExchangeOptions("gradients", compressor=codec))
    for _ in range(3):
        run.step()
    run.pipeline.complete_parameters()
    before = copy.deepcopy((weights(run.model), _kept(run)))
    spoil(run)
    with pytest.raises(RuntimeError, match=message):
        run.optimizer.step()
    run.optimizer.zero_grad()
    for old, new in zip(before[0], weights(run.model), strict=True):
        assert torch.equal(old, new), codec
    _assert_kept(run, before[1])
    for _ in range(3):
        run.step()
    if codec.has_feedback and not codec.brings_momentum:
        assert run.error() <= 1e-5


@distributed(world_sizes=(1, 3))
def test_a_step_with_inf_is_refused_on_all_ranks_and_changes_nothing() -> None:
    for number, codec in enumerate(CODECS):
        value = math.inf if number % 2 else math.nan
        _assert_refused(codec, partial(_backward_of_inf, value=value), "nan or inf")


def _make_nan_in_a_hook(run: Run) -> None:
    """One rank alone, in its own shard among others, after all gradients were finite."""
    run.backward()
    run.part.mean.expose()
    if dist.get_rank() == 0:
        for weight in run.model.weights:
            assert weight.grad is not None
            weight.grad.fill_(math.nan)


@distributed(world_sizes=(1, 3))
def test_nan_from_a_hook_is_refused_on_all_ranks_and_changes_nothing() -> None:
    for codec in (Int8(), TopK(density=0.05, selector="sampled"), DGC(density=0.1)):
        _assert_refused(codec, _make_nan_in_a_hook, "nan or inf.*the hook")


@distributed(world_sizes=(2,))
def test_nan_from_a_hook_shows_on_all_ranks_where_the_host_does_not_look() -> None:
    run = Run(ExchangeOptions("gradients", compressor=Int8()))
    run.step()
    run.pipeline.collectives.wait_blocks_host = False  # as on NCCL
    _make_nan_in_a_hook(run)
    run.optimizer.step()
    run.pipeline.complete_parameters()
    assert all(bool(weight.isnan().all()) for weight in weights(run.model))


@pytest.mark.parametrize("codec", [DGC(density=0.1), EFSignSGD()], ids=lambda one: one.name)
@distributed(world_sizes=(1,))
def test_the_norm_of_residuals_is_that_of_the_parameters(codec: Codec) -> None:
    """What lies between them has none, not even after inf, which makes all means nan."""
    run = Run(ExchangeOptions("gradients", compressor=codec))
    run.step()
    _backward_of_inf(run, math.inf)
    run.optimizer.zero_grad()
    for _ in range(3):
        run.step()
    run.pipeline.complete_parameters()
    assert run.part.plans.active is not None
    for coded in run.part.plans.active.exchange.coded:
        assert all(bool(flat.isfinite().all()) for flat in coded.worker.kept.values())
    kept = [flat for name, own in _kept(run).items() if "residual" in name for flat in own]
    norm = run.part.encoding_figures()["residual_norm"]
    torch.testing.assert_close(norm, torch.cat([one.flatten() for one in kept]).norm())


@distributed(world_sizes=(1,))
def test_the_norm_of_residuals_is_that_of_what_has_not_arrived() -> None:
    """Also of a moving average, which is a part of that."""
    for codec in (
        Int4(block_size=64, halves="reduce"),
        LoCo(block_size=64, halves="reduce"),
        LoCo(block_size=64, halves="reduce", rate=0.5),
    ):
        run = Run(ExchangeOptions("gradients", compressor=codec))
        for _ in range(6):
            run.step()
        run.pipeline.complete_parameters()
        # Weights are what has arrived, times -1.
        pairs = zip(run.expected, run.model.weights, strict=True)
        norm = torch.cat([(one + weight.detach()).flatten() for one, weight in pairs]).norm()
        figure = float(run.part.encoding_figures()["residual_norm"])
        assert figure == pytest.approx(float(norm), rel=0.02), codec


@distributed(world_sizes=(2,))
def test_nothing_is_encoded_between_parameters() -> None:
    """Of the zeros there, signs leave a residual, which would weigh in the scales."""
    run = Run(ExchangeOptions("gradients", compressor=EFSignSGD()))
    for _ in range(3):
        run.step()
    run.pipeline.complete_parameters()
    assert run.part.plans.active is not None
    for coded in run.part.plans.active.exchange.coded:
        assert isinstance(coded, CodedBucket)
        places = coded._padding
        assert places.numel()
        rows = coded.bucket.gradients.view(2, -1)
        coded.compensate(rows, None)
        assert not rows.view(-1)[places].any()
    run.part.plans.active.round.drop()


@distributed(world_sizes=(2,))
def test_a_loss_scale_hears_of_inf_on_another_rank() -> None:
    run = Run(ExchangeOptions("gradients", compressor=SignSGD()))
    run.step()
    _backward_of_inf(run, math.inf)
    seen: list[bool] = []

    def unscale(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            seen.extend(
                bool(torch.isfinite(p.grad).all()) for p in group["params"] if p.grad is not None
            )

    run.part.mean.unscale(unscale)
    assert not all(seen)


@distributed(world_sizes=(2,))
def test_a_loss_scale_hears_of_what_a_codec_would_clip() -> None:
    """Or residuals would grow as long as the scale does."""
    for scale, is_clipped in ((1024.0, True), (512.0, False)):
        run = Run(ExchangeOptions("gradients", compressor=Fp16()))
        run.part.plans.loss_scale = lambda scale=scale: torch.full((1,), scale)
        with pytest.raises(RuntimeError, match="nan or inf") if is_clipped else nullcontext():
            # Halved on two ranks.
            _step_with(run, 200 * scale)


@distributed(world_sizes=(1, 2))
def test_a_spike_that_would_be_sent_for_many_steps_is_refused() -> None:
    """Of half precision 65504 at a time; or it would outweigh all gradients of those steps."""
    _assert_refused(Fp16(), partial(_backward_of_inf, value=1e8), "inf in them.*65504.*'bf16'")


def _step_with(run: Run, value: float, num_steps: int = 1) -> None:
    gradients = [torch.full_like(one, value) for one in gradients_of(0, 0) if one is not None]
    for _ in range(num_steps):
        with run.pipeline.forward():
            loss = run.model(gradients)
        with run.pipeline.backward():
            loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


@distributed(world_sizes=(1, 2))
def test_what_one_more_step_can_send_is_sent() -> None:
    """With twice the range nothing is refused, and nothing is lost."""
    run = Run(ExchangeOptions("gradients", compressor=Fp16()))
    for value in (100000.0, 0.0, 0.0):
        _step_with(run, value)
    run.pipeline.complete_parameters()
    for weight in weights(run.model):
        torch.testing.assert_close(weight, torch.full_like(weight, -100000.0), rtol=1e-5, atol=0)


@distributed(world_sizes=(1, 2))
def test_what_piles_up_is_refused_where_ranks_cannot_see_it_alone() -> None:
    """With two ranks each sends half of it, and owners keep what does not fit."""
    run = Run(ExchangeOptions("gradients", compressor=Fp16()))
    with pytest.raises(RuntimeError, match="inf in them.*65504"):
        _step_with(run, 120000.0, num_steps=5)


@distributed(world_sizes=(1,))
def test_what_is_clipped_on_purpose_is_not_refused() -> None:
    run = Run(ExchangeOptions("gradients", compressor=Fp16(**WITHOUT_FEEDBACK)))
    _step_with(run, 1e8)
    run.pipeline.complete_parameters()
    assert all(bool((weight == -65504).all()) for weight in weights(run.model))


@distributed(world_sizes=(2,))
def test_huge_gradients_are_not_inf() -> None:
    """Their sum, or the sum of their squares, would be."""
    run = Run(ExchangeOptions("gradients", compressor=Int4(block_size=64)))
    _step_with(run, 1e37)
    run.pipeline.complete_parameters()
    for weight in weights(run.model):
        torch.testing.assert_close(weight, torch.full_like(weight, -1e37), rtol=0.2, atol=0)


@pytest.mark.parametrize("planner", [AutoFusion(), MGWFBPFusion()], ids=lambda one: one.name)
def test_planners_that_measure_dense_messages_are_refused(planner: FusionPlanner) -> None:
    options = ExchangeOptions(compressor=Int8())
    with pytest.raises(ValueError, match="int8 encodes.*fusion='mergecomp'.*'bayesian'"):
        check_planner(planner, options)
    for other in (MergeCompFusion(), MergeCompHeuristicFusion(), BayesianFusion(), NoFusion()):
        check_planner(other, options)


@distributed(world_sizes=(2,))
def test_an_update_that_is_not_finite_shows_on_all_ranks() -> None:
    """Encoded as a difference, it would be hidden, and hold up its block."""
    selectors = ("exact", "sampled")
    sparse = [LaggingTopK(density=0.5, selector=name) for name in selectors]
    for codec in (Int8(), Bf16(), *sparse):
        run = Run(ExchangeOptions("parameters", compressor=codec))
        run.step()
        run.optimizer.param_groups[0]["lr"] = math.inf
        run.step()
        run.pipeline.complete_parameters()
        assert not all(bool(weight.isfinite().all()) for weight in weights(run.model))


@distributed(world_sizes=(2,))
def test_ranks_with_other_compressors_are_refused() -> None:
    codec = Int8() if dist.get_rank() else Int8(block_size=64)
    with pytest.raises(ValueError, match="exchange in different ways"):
        Run(ExchangeOptions("gradients", compressor=codec))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DGC(error_feedback=False), "dgc needs error feedback"),
        (lambda: LoCo(rate=0.5, **WITHOUT_FEEDBACK), "rate of loco has no effect"),
    ],
)
def test_options_without_effect_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("wrong", [{"momentum": 0.9}, {"betas": (0.9, 0.99)}, {"beta1": 0.9}])
def test_momentum_is_found_under_all_its_names(wrong: dict[str, Any]) -> None:
    optimizer = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=0.1)
    options = ExchangeOptions("gradients", compressor=Signum())
    check_momentum(optimizer, options)
    optimizer.param_groups[0].update(wrong)
    with pytest.raises(ValueError, match=r"OneCycleLR\(cycle_momentum=False\).*averaged twice"):
        check_momentum(optimizer, options)
    check_momentum(optimizer, ExchangeOptions("gradients", compressor=Int8()))


def test_weight_decay_that_belongs_into_momentum_is_refused() -> None:
    weight = torch.zeros(3, requires_grad=True)
    decaying = torch.optim.SGD([weight], lr=0.1, weight_decay=0.01)
    for codec in (DGC(), OkTopk(momentum=0.5)):
        options = ExchangeOptions("gradients", compressor=codec)
        with pytest.raises(ValueError, match="weight_decay=0.01. Set weight_decay=0 and add.*loss"):
            check_momentum(decaying, options)
        # Which stays outside of momentum everywhere.
        check_momentum(torch.optim.AdamW([weight], betas=(0.0, 0.9)), options)
        check_momentum(torch.optim.SGD([weight], lr=0.1), options)
    for other in (DGC(momentum=0.0), OkTopk(), Signum(), TopK(), Int8()):
        check_momentum(decaying, ExchangeOptions("gradients", compressor=other))


@distributed(world_sizes=(1, 2))
def test_decay_in_the_loss_is_that_of_sgd_with_momentum() -> None:
    """What the refusal names instead."""
    ours, theirs = (_decayed(codec) for codec in (DGC(density=1.0), None))
    for one, other in zip(ours, theirs, strict=True):
        slack = 1e-5 * float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=1e-4, atol=slack)


def _decayed(codec: DGC | None) -> list[Tensor]:
    run = Run(ExchangeOptions("gradients", compressor=codec), momentum=0.0 if codec else 0.9)
    weight_decay, own = 0.05, list(run.model.parameters())
    run.optimizer.param_groups[0].update(lr=0.1, weight_decay=0.0 if codec else weight_decay)
    for step in range(6):
        with run.pipeline.forward():
            loss = run.model(gradients_of(step, dist.get_rank()))
            if codec:
                loss = loss + weight_decay / 2 * sum(p.square().sum() for p in own)
        with run.pipeline.backward():
            loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    run.pipeline.complete_parameters()
    return weights(run.model)


@distributed(world_sizes=(1,))
def test_momentum_that_a_schedule_brings_later_is_refused() -> None:
    run = Run(ExchangeOptions("gradients", compressor=Signum()))
    run.step()
    run.optimizer.param_groups[0]["momentum"] = 0.95
    with pytest.raises(ValueError, match="averaged twice"):
        run.step()
