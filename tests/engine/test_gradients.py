"""Between backward and step: gradients in several rounds, norms, clipping, `.grad` made whole."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dear.engine.step import OptimizerPipeline
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import NoFusion
from tests.distributed.harness import distributed
from tests.training.delays import Delays
from tests.training.linear import SOMETIMES, Known, Run, gradients_of
from tests.training.models import batch, build, loss_of, optimizer_for, weights
from tests.training.three_ways import new_pipeline

LATE = Delays(before_all_gather_s=0.02)
NUM_STEPS = 4
MODEL = "mlp"


def _loss(model: nn.Module, number: int, rank: int) -> Tensor:
    return loss_of(model, *batch(MODEL, number, rank))


def _mean_gradients(model: nn.Module, number: int) -> list[Tensor]:
    """Of all ranks' batches, each times 1/P, added in rank order."""
    world_size = dist.get_world_size()
    parameters = list(model.parameters())
    total: list[Tensor] = []
    for rank in range(world_size):
        own = torch.autograd.grad(_loss(model, number, rank), parameters)
        scaled = [gradient * (1.0 / world_size) for gradient in own]
        total = [a + b for a, b in zip(total, scaled, strict=True)] if total else scaled
    return total


def _train(
    backwards: Sequence[int],
    change: Callable[[OptimizerPipeline, nn.Module], None] = lambda part, model: None,
    synchronize: bool = True,
) -> list[Tensor]:
    """Ours: `backwards` batches a step, all within one synchronised backward, then `change`."""
    model = build(MODEL)
    optimizer = optimizer_for("sgd", model)
    pipeline = new_pipeline(model, optimizer, delays=LATE)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for number in backwards:
            with pipeline.forward():
                loss = _loss(model, 10 * step + number, dist.get_rank())
            with pipeline.backward(synchronize=synchronize):
                loss.backward()
        change(pipeline.of(optimizer), model)
        optimizer.step()
    pipeline.detach()
    return weights(model)


def _reference(
    backwards: Sequence[int],
    change: Callable[[nn.Module], None] = lambda model: None,
) -> list[Tensor]:
    model = build(MODEL)
    optimizer = optimizer_for("sgd", model)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for number in backwards:
            means = _mean_gradients(model, 10 * step + number)
            for parameter, mean in zip(model.parameters(), means, strict=True):
                parameter.grad = mean if parameter.grad is None else parameter.grad + mean
        change(model)
        optimizer.step()
    return weights(model)


def assert_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Bit for bit."""
    for left, right in zip(ours, theirs, strict=True):
        assert torch.equal(left, right), (left - right).abs().max()


def assert_close(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Up to the order of additions."""
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("synchronize", [True, False])
@distributed(world_sizes=(1, 2, 3))
def test_gradients_that_come_after_the_launch_are_added(synchronize: bool) -> None:
    assert_close(_train([0, 1, 2], synchronize=synchronize), _reference([0, 1, 2]))


@distributed(world_sizes=(2,))
def test_a_gradient_that_one_rank_has_after_the_mean_is_refused() -> None:
    model = build(MODEL)
    pipeline = new_pipeline(model, optimizer_for("sgd", model))
    for number in range(2):
        with pipeline.forward():
            losses = [_loss(model, number, dist.get_rank()) for _ in range(2)]
        with pipeline.backward():
            losses[0].backward()
        pipeline.parts[0].mean.norm()
        with pytest.raises(RuntimeError, match=r"Use torch\.autograd\.grad"):
            losses[1].backward()
        pipeline.parts[0].optimizer.zero_grad()
    pipeline.detach()


@distributed(world_sizes=(1, 2, 3))
def test_a_backward_after_a_reduce_is_added() -> None:
    def reduce(part: OptimizerPipeline, model: nn.Module) -> None:
        part.mean.reduce()
        part.mean.reduce()
        with part.backward(synchronize=True):
            _loss(model, 77, dist.get_rank()).backward()

    def add(model: nn.Module) -> None:
        for parameter, mean in zip(model.parameters(), _mean_gradients(model, 77), strict=True):
            parameter.grad = parameter.grad + mean

    assert_close(_train([0], reduce), _reference([0], add))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@distributed(world_sizes=(1, 2, 3))
def test_the_norm_is_that_of_the_mean(norm_type: float) -> None:
    seen: list[Tensor] = []

    def note(part: OptimizerPipeline, model: nn.Module) -> None:
        seen.append(part.mean.norm(norm_type))

    expected: list[Tensor] = []

    def note_there(model: nn.Module) -> None:
        every = torch.cat([p.grad.flatten() for p in model.parameters()])
        expected.append(every.double().norm(norm_type).float())

    assert_equal(_train([0], note), _reference([0], note_there))
    torch.testing.assert_close(torch.stack(seen), torch.stack(expected), rtol=1e-5, atol=0)
    everyone = [torch.empty(len(seen)) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, torch.stack(seen))
    assert all(torch.equal(one, everyone[0]) for one in everyone)


@pytest.mark.parametrize("max_norm", [1e-3, 0.2, 1e3])
@distributed(world_sizes=(1, 2, 3))
def test_clipping_by_norm(max_norm: float) -> None:
    def clip(part: OptimizerPipeline, model: nn.Module) -> None:
        part.mean.clip_by_norm(max_norm)

    def clip_there(model: nn.Module) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    assert_close(_train([0], clip), _reference([0], clip_there))


@distributed(world_sizes=(1, 2, 3))
def test_clipping_by_value() -> None:
    def clip(part: OptimizerPipeline, model: nn.Module) -> None:
        part.mean.clip_by_value(1e-3)

    def clip_there(model: nn.Module) -> None:
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)

    assert_equal(_train([0], clip), _reference([0], clip_there))


def _scale(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)


def _replace(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.grad.sign()


def _drop_first(model: nn.Module) -> None:
    next(iter(model.parameters())).grad = None


def _clip(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def _pull(model: nn.Module) -> None:
    """With a graph, as nobody has said no_grad."""
    for parameter in model.parameters():
        parameter.grad = parameter.grad + 0.01 * parameter


def _pull_in_place(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.add_(parameter, alpha=0.01)


CHANGES = [_scale, _replace, _drop_first, _clip, _pull, _pull_in_place]


@pytest.mark.parametrize("change", CHANGES)
@distributed(world_sizes=(1, 2, 3))
def test_what_is_done_to_exposed_gradients_counts(change: Callable[[nn.Module], None]) -> None:
    def change_exposed(part: OptimizerPipeline, model: nn.Module) -> None:
        part.mean.expose()
        change(model)

    assert_equal(_train([0], change_exposed), _reference([0], change))


@distributed(world_sizes=(1, 2, 3))
def test_a_gradient_given_to_what_nobody_used_counts() -> None:
    for options in (ExchangeOptions(), ExchangeOptions("gradients")):
        run = Run(options)
        run.step()
        run.backward(leaves_out=True)
        run.part.mean.expose()
        unused = run.model.weights[SOMETIMES]
        assert unused.grad is None
        before = unused.detach().clone()
        unused.grad = torch.ones_like(unused)
        run.optimizer.step()
        run.pipeline.complete_parameters()
        torch.testing.assert_close(unused.detach(), before - 1)


@distributed(world_sizes=(1, 2, 3))
def test_exposed_gradients_are_the_mean_and_survive_a_norm_and_a_clip() -> None:
    def look(part: OptimizerPipeline, model: nn.Module) -> None:
        part.mean.expose()
        before = [p.grad.clone() for p in model.parameters()]
        norm = part.mean.norm()
        assert_equal([p.grad for p in model.parameters()], before)
        part.mean.clip_by_norm(float(norm) / 2)
        assert_close([p.grad * 2 for p in model.parameters()], before)

    def halve(model: nn.Module) -> None:
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        torch.nn.utils.clip_grad_norm_(model.parameters(), float(norm) / 2)

    assert_close(_train([0], look), _reference([0], halve))


@distributed(world_sizes=(1, 2, 3))
def test_a_backward_into_exposed_gradients_is_added() -> None:
    def expose(part: OptimizerPipeline, model: nn.Module) -> None:
        part.mean.expose()
        with part.backward(synchronize=True):
            _loss(model, 77, dist.get_rank()).backward()

    def add(model: nn.Module) -> None:
        for parameter, mean in zip(model.parameters(), _mean_gradients(model, 77), strict=True):
            parameter.grad = parameter.grad + mean

    assert_close(_train([0], expose), _reference([0], add))


@pytest.mark.parametrize("exposed", [False, True])
@distributed(world_sizes=(1, 2, 3))
def test_dropped_gradients_leave_nothing_behind(exposed: bool) -> None:
    def begin_anew(part: OptimizerPipeline, model: nn.Module) -> None:
        part.mean.expose() if exposed else part.mean.reduce()
        part.optimizer.zero_grad()
        with part.backward(synchronize=True):
            _loss(model, 77, dist.get_rank()).backward()

    def replace(model: nn.Module) -> None:
        for parameter, mean in zip(model.parameters(), _mean_gradients(model, 77), strict=True):
            parameter.grad = mean

    assert_equal(_train([0], begin_anew), _reference([0], replace))


class _Scaled:
    """A GradScaler around a training on the CPU, the loss of `rank_with_inf` overflowing once."""

    def __init__(self, rank_with_inf: int, step_with_inf: int) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        self.rank_with_inf, self.step_with_inf = rank_with_inf, step_with_inf
        self.scales: list[float] = []

    def factor(self, step: int, rank: int) -> float:
        overflows = step == self.step_with_inf and rank == self.rank_with_inf
        return math.inf if overflows else 1.0

    def step(self, optimizer: Optimizer) -> None:
        self.scaler.step(optimizer)
        self.scaler.update()
        self.scales.append(self.scaler.get_scale())


@distributed(world_sizes=(1, 2, 3))
def test_an_overflow_on_one_rank_skips_the_step_on_all(world_size: int) -> None:
    model, there = build(MODEL), build(MODEL)
    optimizer, optimizer_there = optimizer_for("sgd", model), optimizer_for("sgd", there)
    pipeline = new_pipeline(model, optimizer, delays=LATE)
    ours, theirs = _Scaled(world_size - 1, 2), _Scaled(world_size - 1, 2)
    for step in range(6):
        with pipeline.forward():
            loss = _loss(model, step, dist.get_rank()) * ours.factor(step, dist.get_rank())
        optimizer.zero_grad()
        with pipeline.backward():
            ours.scaler.scale(loss).backward()
        pipeline.of(optimizer).mean.unscale(ours.scaler.unscale_)
        ours.step(optimizer)

        optimizer_there.zero_grad()
        for rank in range(world_size):
            loss = _loss(there, step, rank) * theirs.factor(step, rank) / world_size
            theirs.scaler.scale(loss).backward()
        theirs.step(optimizer_there)
    pipeline.detach()
    assert ours.scales == theirs.scales
    assert ours.scales[2] < ours.scales[1]
    assert_close(weights(model), weights(there))


@distributed(world_sizes=(2, 3))
def test_an_overflow_in_one_shard_skips_the_step_on_all(world_size: int) -> None:
    """The other ranks' shards are finite: only the vote tells them."""
    model = build(MODEL)
    optimizer = optimizer_for("sgd", model)
    pipeline = new_pipeline(model, optimizer)
    scaler, overflows = torch.amp.GradScaler("cpu", init_scale=256.0), False
    last_bias = list(model.parameters())[-1]
    last_bias.register_hook(lambda g: torch.full_like(g, math.inf) if overflows else g)
    for step in range(3):
        before, overflows = weights(model), step == 2
        with pipeline.forward():
            loss = _loss(model, step, dist.get_rank())
        optimizer.zero_grad()
        with pipeline.backward():
            scaler.scale(loss).backward()
        pipeline.of(optimizer).mean.unscale(scaler.unscale_)
        scaler.step(optimizer)
        scaler.update()
        was_stepped = not all(map(torch.equal, before, weights(model)))
        assert was_stepped != overflows
    assert scaler.get_scale() == 128.0
    pipeline.detach()


def _two_optimizers(model: nn.Module) -> tuple[Optimizer, Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    return torch.optim.SGD(matrices, lr=0.05, momentum=0.9), torch.optim.AdamW(vectors, lr=1e-2)


@distributed(world_sizes=(1, 2, 3))
def test_two_optimizers_that_share_every_module(world_size: int) -> None:
    """They step in turns; the one that does not step drops its gradients, or keeps them."""
    model, there = build(MODEL), build(MODEL)
    optimizers, optimizers_there = _two_optimizers(model), _two_optimizers(there)
    pipeline = new_pipeline(model, optimizers[0], delays=LATE, more=optimizers[1:])
    for number in range(9):
        active = number % 2 if number % 3 else 0
        with pipeline.forward():
            loss = _loss(model, number, dist.get_rank())
        with pipeline.backward(optimizers=[optimizers[active]]):
            loss.backward()
        means = _mean_gradients(there, number)
        for parameter, mean in zip(there.parameters(), means, strict=True):
            parameter.grad = mean if parameter.grad is None else parameter.grad + mean
        for mine in (optimizers[active], optimizers_there[active]):
            mine.step()
            mine.zero_grad()
        assert_close(weights(model), weights(there))
    assert pipeline.parts[1].plan is not None
    pipeline.detach()


@distributed(world_sizes=(2,))
def test_gradients_left_over_from_a_step_are_named() -> None:
    model = build(MODEL)
    optimizer = optimizer_for("sgd", model)
    pipeline = new_pipeline(model, optimizer)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for clears in (True, True, False):
            with pipeline.forward():
                loss = _loss(model, 0, dist.get_rank())
            if clears:
                optimizer.zero_grad()
            with pipeline.backward():
                loss.backward()
            optimizer.step()
    pipeline.detach()
    texts = [str(one.message) for one in seen]
    assert len(texts) == (1 if dist.get_rank() == 0 else 0), texts
    assert all("zero_grad() was not called" in text for text in texts)


@distributed(world_sizes=(2,))
def test_two_optimizers_number_their_buckets_apart() -> None:
    """What is under way for both at once must not be taken for each other's."""
    model = build(MODEL)
    optimizers = _two_optimizers(model)
    pipeline = new_pipeline(model, optimizers[0], more=optimizers[1:])
    launch, numbers = pipeline.collectives.launch_all_gather, list[int]()
    pipeline.collectives.launch_all_gather = lambda buffer, number: (
        numbers.append(number) or launch(buffer, number)
    )
    with pipeline.forward():
        loss = _loss(model, 0, dist.get_rank())
    with pipeline.backward():
        loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    assert len(numbers) == len(set(numbers)) > 2
    pipeline.detach()


@distributed(world_sizes=(2,))
def test_two_optimizers_send_in_one_order_where_collectives_must_keep_it() -> None:
    """Though one rank has left a parameter of the first out: its bucket is not full in backward."""
    model = Known()
    halves = [list(model.weights[start::2]) for start in range(2)]
    optimizers = [torch.optim.SGD(half, lr=1.0) for half in halves]
    pipeline = new_pipeline(model, optimizers[0], NoFusion(), more=optimizers[1:])
    pipeline.collectives.matches_by_tag = False  # as on NCCL
    pipeline.hold_back()
    launch, numbers = pipeline.collectives.launch_reduce_scatter, list[int]()
    pipeline.collectives.launch_reduce_scatter = lambda *given: (
        numbers.append(given[3]) or launch(*given)
    )
    for step in range(2):
        numbers.clear()
        with pipeline.forward():
            left_out = step == 1 and dist.get_rank() == 1
            loss = model(gradients_of(step, dist.get_rank(), left_out))
        with pipeline.backward():
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    orders: list[list[int]] = [[], []]
    dist.all_gather_object(orders, numbers)
    assert len(numbers) == len(model.weights)
    assert orders[0] == orders[1]
    pipeline.detach()


@distributed(world_sizes=(1,))
def test_zeroing_instead_of_clearing_is_warned_of() -> None:
    run = Run(ExchangeOptions())
    for given, count in (({}, 0), ({"set_to_none": True}, 0), ({"set_to_none": False}, 1)):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            run.optimizer.zero_grad(**given)
        assert len(said) == count, given


@distributed(world_sizes=(2,))
def test_optimizers_that_step_in_turns_leave_nothing_over() -> None:
    """As of a GAN: each clears its gradients before its own backward, not before the other's."""
    model = build(MODEL)
    optimizers = _two_optimizers(model)
    pipeline = new_pipeline(model, optimizers[0], more=optimizers[1:])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for number in range(6):
            optimizer = optimizers[number % 2]
            with pipeline.forward():
                loss = _loss(model, number, dist.get_rank())
            optimizer.zero_grad()
            with pipeline.backward(optimizers=[optimizer]):
                loss.backward()
            optimizer.step()
    assert [one for one in seen if "zero_grad() was not called" in str(one.message)] == []
    pipeline.detach()


@distributed(world_sizes=(2,))
def test_whoever_kept_zero_grad_may_call_it_after_the_end() -> None:
    model = build(MODEL)
    optimizer = optimizer_for("sgd", model)
    pipeline = new_pipeline(model, optimizer)
    kept = optimizer.zero_grad
    pipeline.detach()
    parameter = next(model.parameters())
    parameter.grad = torch.ones_like(parameter)
    kept()
    assert parameter.grad is None
