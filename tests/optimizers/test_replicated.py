"""gather="gradients": updates that are still pending are never lost, doubled, late or half made."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import NoFusion
from tests.checkpoint.test_default_dtype import default_dtype
from tests.distributed.harness import distributed
from tests.training.delays import Delays
from tests.training.models import batch, build, loss_of, two_groups, weights
from tests.training.three_ways import new_pipeline
from tests.training.whole_tensor import LARS, states_of

GRADIENTS = ExchangeOptions("gradients")
LATE = Delays(before_all_gather_s=0.03)
NUM_STEPS = 5


def _start(
    options: ExchangeOptions | None = GRADIENTS, model_name: str = "mlp"
) -> tuple[nn.Module, Optimizer, Pipeline]:
    model = build(model_name)
    optimizer = LARS(two_groups(model))
    return model, optimizer, new_pipeline(model, optimizer, delays=LATE, options=options)


def _step(
    model: nn.Module, optimizer: Optimizer, pipeline: Pipeline | None, step: int, name: str = "mlp"
) -> None:
    """One step of ours; without a pipeline one of a process that has all ranks' batches."""
    if pipeline is not None:
        with pipeline.forward():
            loss = loss_of(model, *batch(name, step, dist.get_rank()))
        with pipeline.backward():
            loss.backward()
    else:
        for rank in range(dist.get_world_size()):
            (loss_of(model, *batch(name, step, rank)) / dist.get_world_size()).backward()
    optimizer.step()
    optimizer.zero_grad()


def _plain(num_steps: int = NUM_STEPS) -> tuple[nn.Module, Optimizer]:
    model = build("mlp")
    optimizer = LARS(two_groups(model))
    for step in range(num_steps):
        _step(model, optimizer, None, step)
    return model, optimizer


def _assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for left, right in zip(ours, theirs, strict=True):
        assert torch.equal(left, right), (left - right).abs().max()


class _Products(Optimizer):
    """Multiplies matrices, which autocast would round and of which FLOPs are counted."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                # As some of torch's make theirs.
                like = torch.zeros(p.shape, dtype=torch.get_default_dtype())
                momentum = self.state[p].setdefault("momentum", like)
                assert momentum.dtype is p.dtype
                momentum.mul_(0.9).add_(p.grad @ p.grad.T @ p.grad)
                p.sub_(momentum, alpha=self.param_groups[0]["lr"])


def _read_within(how: str, model: nn.Module) -> None:
    """Completes what is pending from within one of torch's contexts."""
    if how == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            model.state_dict()
    elif how == "inference":
        with torch.inference_mode():
            model.state_dict()
    elif how == "grad":
        torch.func.grad(lambda x: (x * sum(p.sum() for p in model.parameters())).sum())(
            torch.ones(2)
        )
    elif how == "vmap":
        torch.func.vmap(lambda x: x * sum(p.sum() for p in model.parameters()))(torch.ones(2))
    elif how == "dtype":
        with default_dtype(torch.float64):
            model.state_dict()
    else:
        with FlopCounterMode(display=False) as counter:
            list(model.parameters())
        assert not counter.get_total_flops()


@distributed(world_sizes=(2,))
def test_an_update_does_not_see_the_contexts_around_a_read() -> None:
    for how in ("autocast", "inference", "grad", "vmap", "dtype", "dispatch mode"):
        _update_within(how)


def _update_within(how: str) -> None:
    def build_matrices() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(7, 9, bias=False), nn.Linear(9, 3, bias=False))

    model, plain = build_matrices(), build_matrices()
    optimizer, plain_optimizer = _Products(model.parameters()), _Products(plain.parameters())
    pipeline = new_pipeline(model, optimizer, NoFusion(), LATE, options=GRADIENTS)
    for step in range(3):
        _step(model, optimizer, pipeline, step)
        if step < 2:
            _read_within(how, model)
        _step(plain, plain_optimizer, None, step)
    pipeline.detach()
    _assert_equal(weights(model), weights(plain))


@distributed(world_sizes=(1, 2))
def test_options_count_as_they_were_at_the_step() -> None:
    model, optimizer, pipeline = _start()
    plain = build("mlp")
    plain_optimizer = LARS(two_groups(plain))
    for step in range(NUM_STEPS):
        for one, of, by in ((model, optimizer, pipeline), (plain, plain_optimizer, None)):
            for group in of.param_groups:
                group["lr"] = 0.1 / (step + 1)
                group["weight_decay"] = 0.01 * step
            _step(one, of, by, step)
            for group in of.param_groups:
                group["lr"], group["weight_decay"] = 1e9, 1e9
    pipeline.detach()
    _assert_equal(weights(model), weights(plain))
    assert [g["count"] for g in optimizer.param_groups] == [NUM_STEPS, NUM_STEPS]


@distributed(world_sizes=(2,))
def test_a_learning_rate_in_a_tensor_counts_as_it_was_at_the_step() -> None:
    def make(model: nn.Module) -> tuple[Optimizer, Tensor]:
        lr = torch.tensor(0.01)
        return torch.optim.AdamW(model.parameters(), lr=lr), lr

    model, plain = build("mlp"), build("mlp")
    (optimizer, lr), (plain_optimizer, plain_lr) = make(model), make(plain)
    pipeline = new_pipeline(model, optimizer, options=GRADIENTS)
    for step in range(NUM_STEPS):
        _step(model, optimizer, pipeline, step)
        _step(plain, plain_optimizer, None, step)
        lr.mul_(0.5)
        plain_lr.mul_(0.5)
    pipeline.detach()
    _assert_equal(weights(model), weights(plain))


@distributed(world_sizes=(2,))
def test_state_is_torchs_own_and_is_read_complete() -> None:
    model, optimizer, pipeline = _start()
    for step in range(NUM_STEPS):
        _step(model, optimizer, pipeline, step)
    direct = states_of(optimizer)
    plain, plain_optimizer = _plain()
    _assert_equal(direct, states_of(plain_optimizer))
    part = pipeline.parts[0]
    for state_dict in (part.optimizer_state_dict(), pipeline.of(optimizer).sharded_state_dict()):
        theirs = plain_optimizer.state_dict()
        assert state_dict["param_groups"] == theirs["param_groups"]
        assert list(state_dict["state"]) == sorted(theirs["state"])
        for index, entries in theirs["state"].items():
            _assert_equal(list(state_dict["state"][index].values()), list(entries.values()))
    _assert_equal(weights(model), weights(plain))


@distributed(world_sizes=(2,))
def test_loaded_state_comes_behind_what_is_pending() -> None:
    model, optimizer, pipeline = _start()
    plain = build("mlp")
    plain_optimizer = LARS(two_groups(plain))
    for step in range(NUM_STEPS):
        for one, of, by in ((model, optimizer, pipeline), (plain, plain_optimizer, None)):
            _step(one, of, by, step)
            if step == 2:
                of.load_state_dict(LARS(two_groups(build("mlp"))).state_dict())
    pipeline.detach()
    _assert_equal(weights(model), weights(plain))


def _resume(saver: ExchangeOptions, resumer: ExchangeOptions) -> list[Tensor]:
    def make(model: nn.Module, options: ExchangeOptions) -> tuple[Optimizer, Pipeline]:
        optimizer = torch.optim.AdamW(two_groups(model), lr=0.01)
        return optimizer, new_pipeline(model, optimizer, delays=LATE, options=options)

    model = build("mlp")
    optimizer, pipeline = make(model, saver)
    for step in range(3):
        _step(model, optimizer, pipeline, step)
    saved = copy.deepcopy(pipeline.parts[0].optimizer_state_dict())
    values = copy.deepcopy(model.state_dict())
    pipeline.detach()
    other = build("mlp", seed=1)
    optimizer, pipeline = make(other, resumer)
    other.load_state_dict(values)
    optimizer.load_state_dict(saved)
    for step in range(3, 6):
        _step(other, optimizer, pipeline, step)
    pipeline.detach()
    return weights(other)


@distributed(world_sizes=(2,))
def test_checkpoints_go_from_mode_to_mode() -> None:
    kinds = (GRADIENTS, ExchangeOptions(), ExchangeOptions("gradients", decouple=False))
    results = [_resume(saver, resumer) for saver in kinds for resumer in kinds]
    for other in results[1:]:
        _assert_equal(other, results[0])


def _clear(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)
    model.zero_grad()


def _drop_a_backward(model: nn.Module, optimizer: Optimizer) -> None:
    loss_of(model, *batch("mlp", 77, dist.get_rank())).backward()
    optimizer.zero_grad()


def _freeze_and_thaw(model: nn.Module, optimizer: Optimizer) -> None:
    model.layers[0].requires_grad_(False)
    model.layers[0].requires_grad_(True)
    optimizer.add_param_group({"params": [], "lr": 0.1})


def _add(model: nn.Module, optimizer: Optimizer) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)


def _replace(model: nn.Module, optimizer: Optimizer) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.99


BETWEEN: dict[str, Callable[[nn.Module, Optimizer], None]] = {
    function.__name__.removeprefix("_"): function
    for function in (_clear, _drop_a_backward, _freeze_and_thaw, _add, _replace)
}


@distributed(world_sizes=(2,))
def test_what_is_done_between_a_step_and_the_next_forward() -> None:
    for name, act in BETWEEN.items():
        print(name)
        model, optimizer, pipeline = _start()
        plain = build("mlp")
        plain_optimizer = LARS(two_groups(plain))
        for step in range(NUM_STEPS):
            for one, of, by in ((model, optimizer, pipeline), (plain, plain_optimizer, None)):
                _step(one, of, by, step)
                if step in (1, 2):
                    act(one, of)
        pipeline.detach()
        _assert_equal(weights(model), weights(plain))


class _Unread(nn.Module):
    """Its second layer is read, and has gradients, in the first step and every third one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(7, 3), nn.Linear(7, 3)

    def forward(self, x: Tensor, step: int) -> Tensor:
        return self.first(x) + (self.second(x) if step % 3 == 0 else 0.0)


@distributed(world_sizes=(2,))
def test_a_bucket_that_no_forward_reads_is_completed_before_its_next_gradients() -> None:
    model, plain = _Unread(), _Unread()
    optimizer, plain_optimizer = LARS(model.parameters()), LARS(plain.parameters())
    pipeline = new_pipeline(model, optimizer, NoFusion(), LATE, options=GRADIENTS)
    for step in range(7):
        inputs, targets = batch("mlp", step, dist.get_rank())
        with pipeline.forward():
            loss = nn.functional.cross_entropy(model(inputs, step), targets)
        if step == 4:
            with pipeline.backward():
                loss.backward(retain_graph=True)
            optimizer.zero_grad()
        with pipeline.backward():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for rank in range(2):
            inputs, targets = batch("mlp", step, rank)
            (nn.functional.cross_entropy(plain(inputs, step), targets) / 2).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    pipeline.detach()
    _assert_equal(weights(model), weights(plain))


@distributed(world_sizes=(2,))
def test_an_exception_in_a_forward_loses_no_update() -> None:
    model, optimizer, pipeline = _start()
    for step in range(NUM_STEPS):
        _step(model, optimizer, pipeline, step)
    with pytest.raises(RuntimeError, match="cannot be multiplied"), pipeline.forward():
        model(torch.zeros(1, 8))
    pipeline.abandon()
    state = pipeline.parts[0].optimizer_state_dict()
    pipeline.detach()
    plain, plain_optimizer = _plain()
    _assert_equal(weights(model), weights(plain))
    assert len(state["state"]) == len(plain_optimizer.state)


class _BreaksOff(LARS):
    _breaks_off = False

    def step(self, closure: Any = None) -> Any:
        if self._breaks_off and any(
            p.grad is not None for g in self.param_groups for p in g["params"]
        ):
            raise KeyboardInterrupt
        return super().step(closure)


# Once torch has seen a LARS, each of its steps calls hooks, also from a subclass's step.
@distributed(world_sizes=(2,), keeps_ranks=False)
def test_a_step_that_breaks_off_is_never_made_twice() -> None:
    model = build("mlp")
    optimizer = _BreaksOff(two_groups(model))
    pipeline = new_pipeline(model, optimizer, options=GRADIENTS)
    _step(model, optimizer, pipeline, 0)
    optimizer._breaks_off = True
    _step(model, optimizer, pipeline, 1)
    with pytest.raises(KeyboardInterrupt):
        pipeline.complete_parameters()
    with pytest.raises(RuntimeError, match="_BreaksOff was broken off half-way"):
        pipeline.complete_parameters()
    with pytest.raises(RuntimeError, match="broken off half-way"):
        optimizer.state_dict()
    pipeline.abandon()
    with warnings.catch_warnings(record=True) as caught:
        pipeline.detach()
    assert "mixture of two steps" in str(caught[0].message)


@distributed(world_sizes=(1, 2))
def test_a_gradient_left_on_a_frozen_parameter_is_not_stepped() -> None:
    model = build("mlp")
    model.layers[0].requires_grad_(False)
    for parameter in model.layers[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.clone() for parameter in model.layers[0].parameters()]
    optimizer = LARS(model.parameters())
    pipeline = new_pipeline(model, optimizer, options=GRADIENTS)
    with pipeline.forward():
        loss = loss_of(model, *batch("mlp", 0, dist.get_rank()))
    with pipeline.backward():
        loss.backward()
    optimizer.step()
    pipeline.detach()
    after = list(model.layers[0].parameters())
    same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    # One process steps what torch steps.
    assert same == [dist.get_world_size() > 1] * 2


@distributed(world_sizes=(2,))
def test_another_plan_keeps_state_and_cuts_no_tensor() -> None:
    model, optimizer, pipeline = _start()
    plans = []
    for step in range(NUM_STEPS):
        _step(model, optimizer, pipeline, step)
        part = pipeline.parts[0]
        if step in (1, 3):
            part.replan(
                (NoFusion() if step == 1 else pipeline.training.fusion).plan(part.tensors, 2)
            )
        plans.append(part.plan)
    pipeline.detach()
    assert plans[0] != plans[2]
    for plan in plans:
        assert all(piece.start == 0 for bucket in plan.buckets for piece in bucket.slices)
    _assert_equal(weights(model), weights(_plain()[0]))
