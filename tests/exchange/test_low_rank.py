"""The low-rank exchange: torch's own PowerSGD gives the same means, and nothing is lost."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dear.bucket import storage_shape
from lightning_dear.compression import Fp32, PowerSGD
from lightning_dear.compression.low_rank import orthonormal
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import NoFusion, SingleFusion
from tests.distributed.harness import distributed
from tests.engine.test_parity import assert_equal_on_all_ranks
from tests.training.linear import Run, gradients_of, unscale
from tests.training.models import weights
from tests.training.three_ways import new_pipeline, train_dear

OPTIONS = ExchangeOptions("gradients", compressor=PowerSGD(rank=2))


@pytest.mark.parametrize("compressor", [PowerSGD(), None])
@distributed(world_sizes=(2,))
def test_other_numbers_of_threads_are_refused(compressor: PowerSGD | None) -> None:
    torch.set_num_threads(1 + dist.get_rank())
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options = ExchangeOptions("gradients", compressor=compressor)
    with pytest.raises(ValueError, match="with 1 threads on rank 0"):
        new_pipeline(model, optimizer, options=options)
    new_pipeline(model, optimizer)


# --- against torch's own --------------------------------------------------------------------------

NUM_STEPS, NUM_SEQUENCES = 20, 20
SHAPES = ((61, 31), (7, 131))
FACTORED = (0, 2)
"""Of `Run`'s tensors."""


class Flat:
    """What torch's hook asks of a bucket: two gradients, side by side."""

    def __init__(self, gradients: list[Tensor]) -> None:
        self._flat = torch.cat([one.flatten() for one in gradients])

    def buffer(self) -> Tensor:
        return self._flat

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def gradients(self) -> list[Tensor]:
        parts = self._flat.split([shape[0] * shape[1] for shape in SHAPES])
        return [part.view(shape) for part, shape in zip(parts, SHAPES, strict=True)]


def _torchs_hook(rank: int, factors: list[Tensor]) -> powerSGD_hook.PowerSGDState:
    """The hook's state as if it had been at work before, and had left `factors`."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    state.iter = 2
    state.error_dict[0] = torch.zeros(sum(n * m for n, m in SHAPES))
    state.p_memory_dict[0] = torch.empty(sum(n * rank for n, _ in SHAPES))
    state.q_memory_dict[0] = torch.cat([one.flatten() for one in factors])
    return state


@distributed(world_sizes=(2,))
def test_it_is_as_near_as_torchs_own() -> None:
    _compare(rank=2, num_sequences=4)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 2])
@distributed(world_sizes=(2, 3))
def test_it_is_as_near_as_torchs_own_on_twenty_sequences(rank: int) -> None:
    _compare(rank, num_sequences=20)


def _compare(rank: int, num_sequences: int) -> None:
    """From the same Q: error of the sum of 20 steps' means, ours over torch's."""
    ratios: list[float] = []
    for sequence in range(num_sequences):
        ratios += _ratios(rank, range(1000 * sequence, 1000 * sequence + NUM_STEPS))
    mean = sum(ratios) / len(ratios)
    print(f"rank {rank}: mean ratio {mean:.6f}, largest {max(ratios):.6f}")
    assert mean <= 1.01


def _ratios(rank: int, steps: range) -> list[float]:
    run = Run(ExchangeOptions("gradients", compressor=PowerSGD(rank=rank)), SingleFusion())
    # Zeros make a plan and leave no residual.
    _step(run, scale=0.0)
    (low,) = run.part.plans.active.exchange.coded  # type: ignore[union-attr]
    state = _torchs_hook(rank, [low.factors[number].clone() for number in FACTORED])
    theirs = [torch.zeros(shape) for shape in SHAPES]
    exact = [torch.zeros(shape) for shape in SHAPES]
    for step in steps:
        _step(run, step=step)
        bucket = Flat(_factored(step, dist.get_rank()))
        powerSGD_hook.powerSGD_hook(state, bucket).wait()  # type: ignore[arg-type]
        torch._foreach_add_(theirs, bucket.gradients())
        for other in range(dist.get_world_size()):
            torch._foreach_add_(exact, _factored(step, other), alpha=1 / dist.get_world_size())
    run.pipeline.complete_parameters()
    ours = [-run.model.weights[number].detach() for number in FACTORED]
    run.pipeline.detach()
    return [
        float((one - right).norm() / (other - right).norm())
        for one, other, right in zip(ours, theirs, exact, strict=True)
    ]


def _factored(step: int, rank: int) -> list[Tensor]:
    made = gradients_of(step, rank)
    return [one for one in (made[number] for number in FACTORED) if one is not None]


def _step(run: Run, step: int = 0, scale: float = 1.0) -> None:
    run.backward(step=step, scale=scale)
    run.optimizer.step()
    run.optimizer.zero_grad()


# --- the feedback law -----------------------------------------------------------------------------


@distributed(world_sizes=(1, 3))
def test_what_is_lost_arrives_later() -> None:
    _check_law(10)


@pytest.mark.slow
@distributed(world_sizes=(1, 2, 3, 4))
def test_what_is_lost_arrives_later_over_fifty_steps() -> None:
    _check_law(50)


def _check_law(num_steps: int) -> None:
    for fusion in (NoFusion(), SingleFusion()):
        run = Run(OPTIONS, fusion)
        for step in range(num_steps):
            run.step(leaves_out=step % 5 == 3)
        assert run.error() <= 1e-5


@distributed(world_sizes=(2,))
def test_the_same_whatever_happens_in_between() -> None:
    """Other plans, several backwards in a step, gradients that are dropped, dense steps."""
    run = Run(OPTIONS)
    for fusion in (NoFusion(), SingleFusion()):
        for _ in range(4):
            run.step()
        run.part.replan(fusion.plan(run.part.tensors, dist.get_world_size()))
    for step in range(4):
        run.backward(step=100 + step)
        run.count(100 + step)
        run.step()
        run.backward(step=200 + step)
        run.optimizer.zero_grad()
    assert run.error() <= 1e-5
    run.pipeline.use_compressor(Fp32())
    run.step()
    assert run.error() <= 1e-5
    assert run.part.encoding_figures()["residual_norm"] == 0
    run.pipeline.use_compressor(PowerSGD(rank=2))
    run.step()
    assert run.error() <= 1e-5
    assert run.part.encoding_figures()["residual_norm"] > 0


@distributed(world_sizes=(2,))
def test_residuals_of_ranks_that_differ_stay_bounded() -> None:
    """Its own factors are subtracted: with the mean's, what ranks differ in would add up."""
    norms = []
    run = Run(OPTIONS, SingleFusion())
    for step in range(40):
        # The same gradient in every step, another one on each rank.
        run.backward(step=0)
        run.optimizer.step()
        run.optimizer.zero_grad()
        if step in (9, 39):
            norms.append(float(run.part.encoding_figures()["residual_norm"]))
    assert norms[1] < 2 * norms[0]


@distributed(world_sizes=(1, 2))
def test_zeros_and_what_comes_after_them() -> None:
    run = Run(OPTIONS, SingleFusion())
    for _ in range(3):
        _step(run, scale=0.0)
    run.pipeline.complete_parameters()
    assert all(not weight.any() for weight in run.model.weights)
    for _ in range(3):
        run.step()
    assert run.error() <= 1e-5


@distributed(world_sizes=(1, 2))
def test_after_a_gradient_that_is_not_finite_training_goes_on() -> None:
    run = Run(OPTIONS)
    run.step()
    for _ in range(2):
        run.backward(scale=math.inf)
        with pytest.raises(RuntimeError, match="nan or inf in them, which compressor='powersgd'"):
            run.optimizer.step()
        run.optimizer.zero_grad()
        run.step()
    assert run.error() <= 1e-5


@distributed(world_sizes=(1, 2))
def test_gradients_whose_products_overflow_are_refused_before_weights_change() -> None:
    """Finite ones, on one rank; and smaller ones are not."""
    run = Run(OPTIONS)
    run.step()
    run.pipeline.complete_parameters()
    before = weights(run.model)
    for factor in (1e36, 1e35):
        run.backward(scale=factor if dist.get_rank() == 0 else 1.0)
        with pytest.raises(RuntimeError, match="powersgd' cannot send.*products might overflow"):
            run.optimizer.step()
        run.optimizer.zero_grad()
    assert all(map(torch.equal, before, weights(run.model)))
    for factor in (1e30, 1e-30):
        run.backward(scale=factor)
        run.optimizer.step()
        run.optimizer.zero_grad()
    run.pipeline.complete_parameters()
    assert all(bool(weight.isfinite().all()) for weight in weights(run.model))


@distributed(world_sizes=(2,))
def test_a_codec_that_is_set_again_leaves_messages_alone() -> None:
    run = Run(OPTIONS)
    for _ in range(4):
        run.step(before=lambda: run.pipeline.use_compressor(PowerSGD(rank=2)))
    run.step(before=lambda: run.pipeline.use_compressor(Fp32()))
    run.step()
    assert run.error() <= 1e-5


@distributed(world_sizes=(2,))
def test_a_loss_scale_that_changes_changes_nothing() -> None:
    plain, scaled = Run(OPTIONS), Run(OPTIONS)
    for step in range(8):
        scale = 2.0 ** (step % 4)
        scaled.part.plans.loss_scale = lambda scale=scale: torch.full((1,), scale)
        plain.step()
        scaled.step(before=partial(unscale, scaled, scale), scale=scale)
    for one, other in zip(weights(plain.model), weights(scaled.model), strict=True):
        torch.testing.assert_close(one, other)


# --- the same bits on all ranks, and after a resume -----------------------------------------------


@distributed(world_sizes=(1, 3))
def test_all_kinds_of_tensors_have_the_same_bits_on_all_ranks() -> None:
    codec = PowerSGD(rank=1, min_saving=1.0)
    for model, dtype in (
        ("mlp", torch.float64),
        ("conv", torch.float32),
        ("channels_last", torch.float32),
    ):
        options = ExchangeOptions("gradients", compressor=codec)
        assert_equal_on_all_ranks(train_dear(model, "adamw", 4, dtype=dtype, options=options))


@distributed(world_sizes=(2,))
def test_factors_go_into_checkpoints_and_survive_another_plan() -> None:
    run = Run(OPTIONS, momentum=0.5)
    for _ in range(3):
        run.step()
    run.pipeline.complete_parameters()
    saved = run.part.optimizer_state_dict()["residuals"]["factors"]
    folder = run.part.sharded_state_dict()["residuals"]["factors"]
    assert {number: one.shape for number, one in saved.items()} == {0: (31, 2), 2: (131, 2)}
    assert {number: one.shape for number, one in folder.items()} == {0: (31, 2), 2: (131, 2)}
    run.part.replan(SingleFusion().plan(run.part.tensors, dist.get_world_size()))
    again = run.part.optimizer_state_dict()["residuals"]["factors"]
    for number, factor in saved.items():
        assert torch.equal(factor, again[number])
        torch.testing.assert_close(factor.T @ factor, torch.eye(2))


# --- what is sent ---------------------------------------------------------------------------------


@distributed(world_sizes=(2,))
def test_only_factors_and_vectors_travel() -> None:
    """Those that need no answer in backward, the others after it."""
    dense = 31 + 1 + 301
    first, second = 2 * (61 + 7) + dense, 2 * (31 + 131)
    for fusion in (NoFusion(), SingleFusion()):
        run = Run(OPTIONS, fusion)
        run.step()
        ledger = run.pipeline.collectives.ledger
        before = ledger["all_reduce"]
        run.backward()
        # An all-reduce over two ranks sends as much as its buffer holds.
        assert ledger["all_reduce"] - before == 4 * first
        run.optimizer.step()
        assert ledger["all_reduce"] - before == 4 * (first + second)


@distributed(world_sizes=(2,))
def test_compressing_nothing_is_warned_of() -> None:
    for rank, count in ((50, 1), (2, 0)):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            Run(ExchangeOptions("gradients", compressor=PowerSGD(rank=rank))).step()
        told = [one for one in said if "'powersgd' compresses nothing" in str(one.message)]
        assert len(told) == (count if dist.get_rank() == 0 else 0)


@distributed(world_sizes=(1, 2))
def test_what_has_no_more_rank_arrives_as_it_is() -> None:
    run = Run(ExchangeOptions("gradients", compressor=PowerSGD(rank=2)), NoFusion())
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, 1, generator=generator) for size in (61, 31))
    gradients = [left @ right.T, *gradients_of(0, 0)[1:]]
    for _ in range(2):
        with run.pipeline.forward():
            loss = run.model(gradients)
        with run.pipeline.backward():
            loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    run.pipeline.complete_parameters()
    torch.testing.assert_close(-run.model.weights[0].detach(), 2 * left @ right.T)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="rank of powersgd must be an integer >= 1, got 0"):
        PowerSGD(rank=0)
    with pytest.raises(ValueError, match="an integer >= 1, got 2.5"):
        PowerSGD(rank=2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="min_saving of powersgd must be at least 1"):
        PowerSGD(min_saving=0.5)
    with pytest.raises(ValueError, match="set gather='gradients'"):
        ExchangeOptions("parameters", compressor=PowerSGD())


def test_rows_are_those_of_the_storage() -> None:
    assert storage_shape(torch.empty(3, 5)) == (3, 5)
    assert storage_shape(torch.empty(3, 5).T) == (3, 5)
    images = torch.empty(4, 3, 2, 5).contiguous(memory_format=torch.channels_last)
    assert storage_shape(images) == (4, 2, 5, 3)


def test_a_basis_is_orthonormal_whatever_it_spans() -> None:
    for factor in (torch.zeros(9, 3), torch.ones(9, 3), 1e-30 * torch.randn(9, 3)):
        basis = orthonormal(factor)
        torch.testing.assert_close(basis.T @ basis, torch.eye(3))


class _Precisions(TorchDispatchMode):
    """Notes how products of fp32 matrices are made when one is."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_):
            self.seen.append(_precision())
        return func(*args, **(kwargs or {}))


def _precision() -> str:
    matmul: Any = getattr(torch.backends.mkldnn, "matmul", None)
    is_exact = torch.get_float32_matmul_precision() == "highest" if matmul is None else False
    return ("ieee" if is_exact else "bf16") if matmul is None else matmul.fp32_precision


@distributed(world_sizes=(1,))
def test_products_are_exact_whatever_users_set_for_theirs() -> None:
    run = Run(OPTIONS, SingleFusion())
    run.step()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        bucket = run.part.plans.active.exchange.coded[0]
        with _Precisions() as noting:
            bucket.compensated(None)
            messages = bucket.encode_first()
            bucket.encode_second(messages, None)
            bucket.decode(messages)
        assert set(noting.seen) == {"ieee"}
        assert len(noting.seen) == 4 * len(bucket.factors)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
