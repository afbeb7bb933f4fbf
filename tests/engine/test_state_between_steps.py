"""`optimizer.state` between steps: reads are refused by name, and writes count, as under DDP."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions
from tests.distributed.harness import distributed
from tests.training.models import batch, build, loss_of, weights
from tests.training.three_ways import new_pipeline

MODEL, NUM_STEPS = "mlp", 5
SHARDS, WHOLE = ExchangeOptions(), ExchangeOptions("gradients")
OPTIONS = [SHARDS, WHOLE]

Change = Callable[[Optimizer], object]


class Curved(Optimizer):
    """Element-wise. One more method uses `.grad` and state, and another one writes weights."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, dict(lr=0.02))

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["m"], state["h"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return state

    @torch.no_grad()
    def update_curvature(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                h = self._state_of(parameter)["h"]
                h.mul_(0.9).addcmul_(parameter.grad, parameter.grad, value=0.1)

    @torch.no_grad()
    def look_ahead(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(self._state_of(parameter)["m"], alpha=0.01)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self._state_of(parameter)
                state["m"].mul_(0.9).add_(parameter.grad, alpha=0.1)
                parameter.sub_((state["m"] / (state["h"] + 0.01)).clamp(-1, 1), alpha=0.02)


def _adam(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _curved(model: nn.Module) -> Optimizer:
    return Curved(model.parameters())


def _loss(model: nn.Module, number: int, rank: int) -> Tensor:
    return loss_of(model, *batch(MODEL, number, rank, torch.float64))


def _start(options: ExchangeOptions, new: Callable[[nn.Module], Optimizer]) -> Pipeline:
    model = build(MODEL, dtype=torch.float64)
    return new_pipeline(model, new(model), options=options)


def _backward(pipeline: Pipeline, number: int) -> None:
    with pipeline.forward():
        loss = _loss(pipeline.training.module, number, dist.get_rank())
    with pipeline.backward():
        loss.backward()


def _step(pipeline: Pipeline, number: int) -> None:
    _backward(pipeline, number)
    (optimizer,) = pipeline.optimizers
    optimizer.step()
    optimizer.zero_grad()


def _mean(model: nn.Module, number: int) -> None:
    for rank in range(dist.get_world_size()):
        (_loss(model, number, rank) / dist.get_world_size()).backward()


def _reference(
    new: Callable[[nn.Module], Optimizer], change: Change, behind: Change
) -> list[Tensor]:
    """One process: `change` before each second step, `behind` before each step's zero_grad."""
    model = build(MODEL, dtype=torch.float64)
    optimizer = new(model)
    for number in range(NUM_STEPS):
        if number % 2:
            change(optimizer)
        _mean(model, number)
        optimizer.step()
        optimizer.zero_grad()
        if number % 2:
            _mean(model, 50 + number)
            behind(optimizer)
            optimizer.zero_grad()
    return weights(model)


def _check(pipeline: Pipeline, wanted: list[Tensor]) -> None:
    ours = weights(pipeline.training.module)
    for left, right in zip(ours, wanted, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-12)
    everyone: list[list[Tensor]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, ours)
    assert all(map(torch.equal, everyone[0], ours))


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return list(optimizer.param_groups[0]["params"])


def _assign(optimizer: Optimizer) -> None:
    optimizer.state = defaultdict(dict)


def _clear(optimizer: Optimizer) -> None:
    optimizer.state.clear()


def _delete(optimizer: Optimizer) -> None:
    for parameter in _parameters(optimizer)[::2]:
        del optimizer.state[parameter]


def _pop(optimizer: Optimizer) -> None:
    for parameter in _parameters(optimizer)[1:]:
        optimizer.state.pop(parameter, None)


def _entry(parameter: Tensor) -> dict[str, Tensor]:
    moment = torch.linspace(0, 1e-3, parameter.numel(), dtype=parameter.dtype)
    moment = moment.view_as(parameter)
    return {"step": torch.tensor(3.0), "exp_avg": moment, "exp_avg_sq": moment.square() + 1e-6}


def _put(optimizer: Optimizer) -> None:
    for parameter in _parameters(optimizer)[:3]:
        optimizer.state[parameter] = _entry(parameter)


def _empty(optimizer: Optimizer) -> None:
    for parameter in _parameters(optimizer)[1:]:
        optimizer.state[parameter] = {}


def _update(optimizer: Optimizer) -> None:
    optimizer.state.clear()
    optimizer.state.update({parameter: _entry(parameter) for parameter in _parameters(optimizer)})


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("change", [_assign, _clear, _delete, _pop, _put, _empty, _update])
@distributed(world_sizes=(1, 2, 3))
def test_what_is_reset_or_written_counts(change: Change, options: ExchangeOptions) -> None:
    pipeline = _start(options, _adam)
    for number in range(NUM_STEPS):
        if number % 2:
            change(pipeline.optimizers[0])
        _step(pipeline, number)
    pipeline.detach()
    _check(pipeline, _reference(_adam, change, lambda _: None))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("method", [Curved.update_curvature, Curved.look_ahead])
@distributed(world_sizes=(1, 2, 3))
def test_a_second_method_runs_on_shards(method: Change, options: ExchangeOptions) -> None:
    pipeline = _start(options, _curved)
    (part,) = pipeline.parts
    with part.on_shards():
        pass  # There is no plan yet.
    for number in range(NUM_STEPS):
        if number % 2:
            with part.on_shards():
                method(part.optimizer)
        _step(pipeline, number)
        if number % 2:
            _backward(pipeline, 50 + number)
            with part.on_shards():
                method(part.optimizer)
            part.optimizer.zero_grad()
    pipeline.complete_parameters()
    pipeline.detach()
    _check(pipeline, _reference(_curved, method, method))


READS: list[Change] = [
    lambda one: one.state[_parameters(one)[0]],
    lambda one: one.state.get(_parameters(one)[0]),
    lambda one: one.state.setdefault(_parameters(one)[0], {}),
    lambda one: _parameters(one)[0] in one.state,
    lambda one: len(one.state),
    lambda one: bool(one.state),
    lambda one: list(one.state),
    lambda one: list(one.state.items()),
    lambda one: dict(one.state),
    lambda one: one.state.popitem(),
    lambda one: one.state == {},
    lambda one: one.update_curvature(),  # type: ignore[attr-defined]
]


@pytest.mark.parametrize("new", [_adam, _curved])
@distributed(world_sizes=(1, 2))
def test_reads_of_sharded_state_are_refused(new: Callable[[nn.Module], Optimizer]) -> None:
    pipeline = _start(SHARDS, new)
    (optimizer,) = pipeline.optimizers
    assert not optimizer.state, "there is none yet"
    _step(pipeline, 0)
    for parameter in _parameters(optimizer):
        parameter.grad = torch.zeros_like(parameter)
    for read in READS if isinstance(optimizer, Curved) else READS[:-1]:
        with pytest.raises(RuntimeError, match=r"strategy\.on_shards\(optimizer\)"):
            read(optimizer)
    pipeline.detach()
    with pytest.raises(RuntimeError, match=r"training of this .* has ended.*on_all_ranks=True"):
        bool(optimizer.state)


@distributed(world_sizes=(2,))
def test_an_entry_that_was_popped_cannot_be_used_elsewhere() -> None:
    pipeline = _start(SHARDS, _adam)
    _step(pipeline, 0)
    state: Any = pipeline.optimizers[0].state
    first, second, *_ = _parameters(pipeline.optimizers[0])
    popped = state.pop(first, None)
    for use in (bool, dict, lambda one: state.__setitem__(second, one)):
        with pytest.raises(RuntimeError, match="on_shards"):
            use(popped)
    state[first] = _entry(first)
    assert state[first].keys() == state.pop(first).keys(), "what was written can be read"
    pipeline.detach()


@distributed(world_sizes=(2,))
def test_with_gathered_gradients_reads_are_of_the_last_step() -> None:
    pipeline = _start(WHOLE, _adam)
    (optimizer,) = pipeline.optimizers
    model = build(MODEL, dtype=torch.float64)
    other = _adam(model)
    for number in range(3):
        _step(pipeline, number)
        _mean(model, number)
        other.step()
        other.zero_grad()
        assert len(optimizer.state) == len(other.state)
        for left, right in zip(_parameters(optimizer), _parameters(other), strict=True):
            found, wanted = optimizer.state[left]["exp_avg"], other.state[right]["exp_avg"]
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    _backward(pipeline, 3)
    with pytest.raises(RuntimeError, match=r"not averaged yet.*on_shards"):
        len(optimizer.state)
    optimizer.step()
    assert len(pickle.loads(pickle.dumps(optimizer.state))) == len(other.state)
    pipeline.detach()


@distributed(world_sizes=(2,))
def test_copies_pickles_and_moves_of_sharded_state_pass() -> None:
    pipeline = _start(SHARDS, _adam)
    (optimizer,) = pipeline.optimizers
    _step(pipeline, 0)
    repr(optimizer.state)
    with pytest.warns(UserWarning, match="copies and pickles"):
        twin = copy.deepcopy(optimizer)
    assert type(twin.state) is defaultdict
    assert not twin.state
    assert pickle.loads(pickle.dumps(optimizer.state)) == {}
    _optimizer_to_device(optimizer, torch.device("cpu"))
    assert len(pipeline.parts[0].optimizer_state_dict()["state"]) == len(_parameters(optimizer))
    pipeline.detach()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("change", [_assign, _delete, _put])
@distributed(world_sizes=(2,))
def test_a_write_on_one_rank_alone_is_refused(change: Change, options: ExchangeOptions) -> None:
    pipeline = _start(options, _adam)
    _step(pipeline, 0)
    if dist.get_rank() == 1:
        change(pipeline.optimizers[0])
    with pytest.raises(ValueError, match=r"written to other entries of optimizer\.state"):
        _step(pipeline, 1)


@pytest.mark.parametrize("after", OPTIONS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("change", [_assign, _delete, _put])
@distributed(world_sizes=(2,))
def test_what_is_written_between_two_trainings_counts(
    change: Change, options: ExchangeOptions, after: ExchangeOptions
) -> None:
    first = _start(options, _adam)
    model, (optimizer,) = first.training.module, first.optimizers
    _step(first, 0)
    first.complete_parameters()
    first.detach()
    change(optimizer)
    second = new_pipeline(model, optimizer, options=after)
    second.parts[0].inherit(first.parts)
    if after is SHARDS and options is SHARDS and change is not _assign:
        with pytest.raises(RuntimeError, match="on_shards"):
            len(optimizer.state)
    _step(second, 1)
    second.detach()
    other = build(MODEL, dtype=torch.float64)
    theirs = _adam(other)
    for number in range(2):
        if number:
            change(theirs)
        _mean(other, number)
        theirs.step()
        theirs.zero_grad()
    _check(second, weights(other))


@pytest.mark.parametrize("is_after_end", [False, True])
@pytest.mark.parametrize("change", [_assign, _clear, _pop, _empty])
@distributed(world_sizes=(2,))
def test_what_is_removed_after_the_last_step_is_not_saved(
    change: Change, is_after_end: bool
) -> None:
    pipeline = _start(SHARDS, _adam)
    (part,) = pipeline.parts
    _step(pipeline, 0)
    pipeline.complete_parameters()
    if not is_after_end:
        change(part.optimizer)
    pipeline.detach()
    if is_after_end:
        change(part.optimizer)
    saved = part.optimizer_state_dict()["state"]
    left = {number for number, own in saved.items() if own}
    assert left == (set() if change in (_assign, _clear) else {0})


@pytest.mark.parametrize("options", OPTIONS)
@distributed(world_sizes=(1, 2))
def test_a_plain_backward_on_any_rank_is_averaged_on_shards(options: ExchangeOptions) -> None:
    pipeline = _start(options, _curved)
    (optimizer,) = pipeline.optimizers
    _step(pipeline, 0)
    if dist.get_rank() == 0:
        _loss(pipeline.training.module, 50, 0).backward()
    with pipeline.parts[0].on_shards():
        optimizer.update_curvature()  # type: ignore[attr-defined]
    optimizer.zero_grad()
    _step(pipeline, 1)
    pipeline.detach()
    model = build(MODEL, dtype=torch.float64)
    theirs = Curved(model.parameters())
    _mean(model, 0)
    theirs.step()
    theirs.zero_grad()
    (_loss(model, 50, 0) / dist.get_world_size()).backward()
    theirs.update_curvature()
    theirs.zero_grad()
    _mean(model, 1)
    theirs.step()
    _check(pipeline, weights(model))


@distributed(world_sizes=(2,))
def test_weights_are_gathered_also_if_code_on_shards_raises() -> None:
    pipeline = _start(SHARDS, _curved)
    (part,) = pipeline.parts
    _step(pipeline, 0)
    pipeline.complete_parameters()
    with pytest.raises(KeyError), part.on_shards():  # noqa: PT012
        part.optimizer.look_ahead()  # type: ignore[attr-defined]
        raise KeyError
    everyone: list[list[Tensor]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, weights(pipeline.training.module))
    assert all(map(torch.equal, *everyone))
    pipeline.detach()
