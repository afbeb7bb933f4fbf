"""Whoever reads, loads or replaces parameters between steps sees, and gets, the new values."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_dear.exchange.options import ExchangeOptions
from tests.distributed.harness import distributed
from tests.training.delays import Delays
from tests.training.models import batch, build, loss_of, optimizer_for, weights
from tests.training.three_ways import new_pipeline, train_dear, train_reference, train_steps

LATE = Delays(before_all_gather_s=0.05)
READERS = {
    "parameters": lambda model: list(model.parameters()),
    "state_dict": lambda model: list(model.state_dict(keep_vars=True).values()),
    "attribute": lambda model: [
        p for m in model.modules() for p in (getattr(m, n) for n in m._parameters) if p is not None
    ],
    "deepcopy": lambda model: list(copy.deepcopy(model).parameters()),
    "pickle": lambda model: list(pickle.loads(pickle.dumps(model)).parameters()),
    "to": lambda model: list(model.to(torch.float32).parameters()),
}


@pytest.mark.parametrize("reader", sorted(READERS))
@distributed(world_sizes=(1, 2))
def test_reads_between_steps_see_the_new_values(reader: str, world_size: int) -> None:
    model = build("mlp")
    pipeline = new_pipeline(model, optimizer_for("sgd", model), delays=LATE)
    expected = train_reference("mlp", "sgd", 3, world_size)[0]
    for step in range(3):
        train_steps(pipeline, model, [step])
        seen = READERS[reader](model)
        assert all(torch.equal(a, b) for a, b in zip(seen, expected[step], strict=True))
    pipeline.detach()


@distributed(world_sizes=(2,))
def test_a_first_read_within_a_transform_sees_the_new_values() -> None:
    model = build("mlp")
    pipeline = new_pipeline(model, optimizer_for("sgd", model), delays=LATE)
    train_steps(pipeline, model, [0])
    total = torch.func.grad(lambda x: x * sum(p.sum() for p in model.parameters()))(torch.ones(()))
    assert torch.equal(total, sum(one.sum() for one in weights(model)))
    pipeline.detach()


@distributed(world_sizes=(1, 2))
def test_evaluation_forwards_read_new_values_and_update_nothing(world_size: int) -> None:
    expected = train_reference("mlp", "sgd", 4, world_size)[0]

    def evaluate(model: nn.Module, step: int) -> None:
        for grad_enabled in (True, False):
            with torch.set_grad_enabled(grad_enabled):
                loss_of(model, *batch("mlp", 99, 0))
        with torch.inference_mode():
            loss_of(model, *batch("mlp", 99, 0))
        assert all(torch.equal(a, b) for a, b in zip(weights(model), expected[step], strict=True))

    train_dear("mlp", "sgd", 4, delays=LATE, between_steps=evaluate)


@distributed(world_sizes=(1, 2))
def test_writes_between_steps_are_kept(world_size: int) -> None:
    def shrink(model: nn.Module, step: int) -> None:
        parameters = list(model.parameters())
        with torch.no_grad():
            if step == 0:
                for parameter in parameters:
                    parameter.mul_(0.5)
            if step == 1:
                for parameter in parameters:
                    parameter.data = parameter.data * 0.5
            if step == 2:
                halved = {name: value * 0.5 for name, value in model.state_dict().items()}
                model.load_state_dict(halved, assign=True)

    def shrunk_reference() -> list[torch.Tensor]:
        model = build("mlp")
        optimizer = optimizer_for("sgd", model)
        for step in range(4):
            total = None
            for rank in range(world_size):
                optimizer.zero_grad()
                loss_of(model, *batch("mlp", step, rank)).backward()
                scaled = [p.grad * (1.0 / world_size) for p in model.parameters()]
                total = (
                    scaled if total is None else [a + b for a, b in zip(total, scaled, strict=True)]
                )
            for parameter, gradient in zip(model.parameters(), total, strict=True):
                parameter.grad = gradient
            optimizer.step()
            if step < 3:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(0.5)
        return weights(model)

    ours = train_dear("mlp", "sgd", 4, delays=LATE, between_steps=shrink)[0][-1]
    assert all(torch.equal(a, b) for a, b in zip(ours, shrunk_reference(), strict=True))


@distributed(world_sizes=(2,))
def test_a_stale_read_that_no_gate_sees_is_refused() -> None:
    model = build("mlp")
    held = model.layers[0].weight
    pipeline = new_pipeline(model, optimizer_for("sgd", model), delays=LATE)
    train_steps(pipeline, model, [0])
    with pipeline.forward():
        early = torch.nn.functional.linear(torch.randn(5, 7, requires_grad=True), held).sum()
        loss = loss_of(model, *batch("mlp", 1, dist.get_rank())) + early
    with pytest.raises(RuntimeError, match="modified by an inplace operation|still being gathered"):
        loss.backward()
    pipeline.complete_parameters()


@distributed(world_sizes=(2,))
def test_a_gradient_for_a_pending_parameter_names_it() -> None:
    model = build("mlp")
    held = model.layers[0].bias
    pipeline = new_pipeline(model, optimizer_for("sgd", model), delays=LATE)
    train_steps(pipeline, model, [0])
    with pytest.raises(RuntimeError, match=r"'layers\.0\.bias'.*still being gathered"):
        held.sum().backward()
    pipeline.complete_parameters()


@distributed(world_sizes=(2,))
def test_a_second_gradient_that_nobody_could_know_of_names_the_remedy() -> None:
    model = build("mlp")
    pipeline = new_pipeline(model, optimizer_for("sgd", model))
    train_steps(pipeline, model, [0])
    pipeline.collectives.wait_blocks_host = False  # as on NCCL
    with pipeline.forward():
        loss = loss_of(model, *batch("mlp", 1, dist.get_rank()))
    with pipeline.backward():
        loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="block_backward_sync"), pipeline.backward():
        loss.backward()


@distributed(world_sizes=(2,))
def test_an_audit_finds_a_read_that_takes_part_in_no_backward() -> None:
    model = build("mlp")
    held = model.layers[0].weight
    pipeline = new_pipeline(model, optimizer_for("sgd", model), delays=LATE, audit=True)
    for step in range(2):  # the audit lets ordinary reads pass
        train_steps(pipeline, model, [step])
    with (
        pytest.raises(RuntimeError, match=r"'layers\.0\.weight' was read while"),
        pipeline.forward(),
        torch.no_grad(),
    ):
        held.sum()
    pipeline.complete_parameters()


def _train_reading_outside(
    model: nn.Module, read: Callable[[nn.Module], torch.Tensor], num_steps: int = 3
) -> list[torch.Tensor]:
    """Ours, with `read(model)` added to every loss behind the model's own forward and before it."""
    optimizer = optimizer_for("sgd", model)
    pipeline = new_pipeline(model, optimizer, delays=LATE)
    for step in range(num_steps):
        with pipeline.forward():
            loss = read(model) + loss_of(model, *batch("mlp", step, dist.get_rank()))
        optimizer.zero_grad()
        with pipeline.backward():
            loss.backward()
        optimizer.step()
    pipeline.detach()
    return weights(model)


def _plain_reading_outside(
    model: nn.Module, read: Callable[[nn.Module], torch.Tensor], num_steps: int = 3
) -> list[torch.Tensor]:
    optimizer = optimizer_for("sgd", model)
    for step in range(num_steps):
        optimizer.zero_grad()
        for rank in range(dist.get_world_size()):
            loss = read(model) + loss_of(model, *batch("mlp", step, rank))
            (loss / dist.get_world_size()).backward()
        optimizer.step()
    return weights(model)


@distributed(world_sizes=(2,))
def test_a_held_tensor_read_outside_any_module_is_waited_for() -> None:
    ours, theirs = build("mlp"), build("mlp")
    held = {id(model): list(model.parameters()) for model in (ours, theirs)}

    def read(model: nn.Module) -> torch.Tensor:
        return sum((p.square().sum() for p in held[id(model)]), torch.zeros(())) * 0.01

    left, right = _train_reading_outside(ours, read), _plain_reading_outside(theirs, read)
    pairs = zip(left, right, strict=True)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in pairs)


class _Uses(nn.Module):
    """Adds a tensor that belongs to another module."""

    def __init__(self, held: list[nn.Parameter]) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.held[0]


class _Drops(nn.Module):
    """Of two modules that read the last bias, the first is left out in every second step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.users = nn.ModuleList([_Uses([self.last.bias]), _Uses([self.last.bias])])
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.users[0](x) if self.step % 2 == 0 else x
        self.step += 1
        return self.last(torch.tanh(self.first(self.users[1](x)))).square().mean()


@distributed(world_sizes=(2,))
def test_every_module_that_reads_a_held_tensor_waits() -> None:
    ours, theirs = _Drops(), _Drops()
    optimizer, plain = (torch.optim.SGD(one.parameters(), 0.5) for one in (ours, theirs))
    pipeline = new_pipeline(ours, optimizer, delays=LATE)
    inputs = [torch.randn(6, 4, generator=torch.Generator().manual_seed(n)) for n in range(2)]
    for step in range(4):
        with pipeline.forward():
            loss = ours(inputs[dist.get_rank()])
        with pipeline.backward():
            loss.backward()
        for one in inputs:
            theirs.step = step
            (theirs(one) / 2).backward()
        for one in (optimizer, plain):
            one.step()
            one.zero_grad()
    pipeline.detach()
    torch.testing.assert_close(weights(ours), weights(theirs))


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
@distributed(world_sizes=(2,))
def test_a_step_in_mid_forward_delays_no_later_forward(gather: str) -> None:
    model = build("mlp")
    optimizer = optimizer_for("sgd", model)
    pipeline = new_pipeline(model, optimizer, options=ExchangeOptions(gather))  # type: ignore[arg-type]
    for step in range(3):
        with pipeline.forward():
            loss = loss_of(model, *batch("mlp", step, dist.get_rank()))
            optimizer.zero_grad()
            with pipeline.backward():
                loss.backward()
            optimizer.step()
        active = pipeline.of(optimizer).plans.active
        assert active is not None
        assert active.gatherer.entry == ()
    pipeline.detach()


@pytest.mark.parametrize("is_read_before", [False, True])
@distributed(world_sizes=(2,))
def test_it_is_waited_for_after_a_step_in_mid_forward(is_read_before: bool) -> None:
    """Manual optimisation: the step stands before a read in the same forward, or between two."""
    model, expected = build("mlp"), train_reference("mlp", "sgd", 3, 2)[0]
    held = list(model.parameters())
    optimizer = optimizer_for("sgd", model)
    pipeline = new_pipeline(model, optimizer, delays=LATE)
    for step in range(3):
        with pipeline.forward():
            with torch.no_grad():
                read = [p.sum() for p in held] if is_read_before else []
            loss = loss_of(model, *batch("mlp", step, dist.get_rank()))
            optimizer.zero_grad()
            with pipeline.backward():
                loss.backward()
            optimizer.step()
            with torch.no_grad():
                read = [p.sum() for p in held]
        assert all(torch.equal(a, b.sum()) for a, b in zip(read, expected[step], strict=True))
    pipeline.detach()


@distributed(world_sizes=(2,))
def test_a_compiled_function_over_held_tensors_is_waited_for() -> None:
    """No module runs in it and no gate sees it; recorded eagerly, it runs compiled ever after."""
    ours, theirs = build("mlp"), build("mlp")
    held = {id(model): list(model.parameters()) for model in (ours, theirs)}
    ours.compile(backend="eager", fullgraph=True)

    def read(model: nn.Module) -> torch.Tensor:
        return sum((p.square().sum() for p in held[id(model)]), torch.zeros(())) * 0.01

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        left = _train_reading_outside(ours, read)
    pairs = zip(left, _plain_reading_outside(theirs, read), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in pairs)


@distributed(world_sizes=(2,))
def test_nothing_is_under_way_into_a_parameter_when_it_is_stepped() -> None:
    """Also where no forward has read it since: its new value must not be overwritten."""
    model = build("mlp")
    optimizer = optimizer_for("sgd", model)
    pipeline = new_pipeline(model, optimizer, delays=LATE)
    train_steps(pipeline, model, [0])
    part, seen = pipeline.of(optimizer), []
    assert part.plans.active is not None
    gatherer = part.plans.active.gatherer
    assert not gatherer.is_idle
    pipeline.training.buffers.launch = lambda: seen.append(gatherer.is_idle)
    optimizer.step()
    assert seen == [True]
    pipeline.detach()
