"""Hooks that others register: when they run beside ours, and what is in `.grad` then."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_dear.engine.hooks import StepHooks
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions
from tests.distributed.harness import distributed
from tests.training import three_ways
from tests.training.delays import Delays
from tests.training.models import batch, build, loss_of, optimizer_for, weights
from tests.training.three_ways import new_native, new_pipeline, train_steps

LATE = Delays(before_all_gather_s=0.02)


def _hooked(
    delays: Delays | None = LATE, options: ExchangeOptions | None = None
) -> tuple[nn.Module, Optimizer, Pipeline]:
    torch.manual_seed(0)
    model = build("mlp")
    optimizer = optimizer_for("sgd", model)
    pipeline = new_pipeline(model, optimizer, delays=delays, options=options)
    return model, optimizer, pipeline


def _plain(
    num_steps: int, options: ExchangeOptions | None = None, delays: Delays | None = LATE
) -> list[Tensor]:
    model, _, pipeline = _hooked(delays, options)
    train_steps(pipeline, model, range(num_steps))
    pipeline.detach()
    return weights(model)


def _assert_equal_on_ranks(tensors: Sequence[Tensor]) -> None:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, list(tensors))
    for other in everyone:
        assert all(map(torch.equal, everyone[0], other))


def _step_by_closure(
    pipeline: Pipeline, model: nn.Module, optimizer: Optimizer, number: int
) -> None:
    def closure() -> Tensor:
        with pipeline.forward():
            loss = loss_of(model, *batch("mlp", number, dist.get_rank()))
        optimizer.zero_grad()
        with pipeline.backward():
            loss.backward()
        return loss

    optimizer.step(closure)


@contextmanager
def _told(part: str) -> Iterator[list[str]]:
    """The warnings with `part` in them; complete behind the block."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield texts
    texts += [str(one.message) for one in told if part in str(one.message)]


@pytest.mark.parametrize("is_behind", [False, True])
@distributed(world_sizes=(2,))
def test_hooks_before_backward_and_behind_the_step_find_no_gradient(is_behind: bool) -> None:
    model, optimizer, pipeline = _hooked()
    seen: list[Tensor | None] = []

    def look(*_: Any) -> None:
        seen.extend(one.grad for one in model.parameters())

    with _told("Hooks of the step of SGD") as texts:
        if is_behind:
            optimizer.register_step_post_hook(look)
            train_steps(pipeline, model, range(3))
        else:
            optimizer.register_step_pre_hook(look)
            for number in range(3):
                _step_by_closure(pipeline, model, optimizer, number)
    assert len(texts) == (dist.get_rank() == 0)
    assert seen
    assert seen.count(None) == len(seen)
    pipeline.detach()
    for a, b in zip(weights(model), _plain(3), strict=True):
        assert torch.equal(a, b)


def _has_gradient(model: nn.Module) -> bool:
    return any(one.grad is not None for one in model.parameters())


GATHERS = pytest.mark.parametrize("gather", ["parameters", "gradients"])
SCALED = 0.25


def _trained_by_hooks(gather: str, *, everywhere: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Weights after steps with scaled gradients, and the gradients that hooks have found.

    Args:
        gather: What is gathered.
        everywhere: Whether hooks of all ranks scale. If not, all ranks scale in `expose`, and rank
            0's hook looks alone.
    """
    model, optimizer, pipeline = _hooked(options=ExchangeOptions(gather))
    seen: list[Tensor] = []

    def scale(*_: Any) -> None:
        for one in model.parameters():
            assert one.grad is not None
            seen.append(one.grad.clone())
            one.grad.mul_(SCALED)

    def look(*_: Any) -> None:
        assert all(one.grad is not None for one in model.parameters())

    def between(_: int) -> None:
        pipeline.parts[0].mean.expose()
        scale()

    if everywhere:
        optimizer.register_step_pre_hook(scale)
    elif dist.get_rank() == 0:
        optimizer.register_step_pre_hook(look)
    with _told("gathers the mean gradient") as texts:
        train_steps(pipeline, model, range(3), between=(lambda _: None) if everywhere else between)
    assert len(texts) == (everywhere and dist.get_rank() == 0 and dist.get_world_size() > 1)
    pipeline.detach()
    return weights(model), seen


@GATHERS
@distributed(world_sizes=(1, 2, 3))
def test_hooks_behind_backward_find_the_mean_and_their_changes_count(gather: str) -> None:
    ours, seen = _trained_by_hooks(gather, everywhere=True)
    theirs, means = _trained_by_hooks(gather, everywhere=False)
    for a, b in zip([*ours, *seen], [*theirs, *means], strict=True):
        assert torch.equal(a, b)
    for a, b in zip(ours, _plain(3), strict=True):
        assert not torch.equal(a, b)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("hooked", [0, 1])
@distributed(world_sizes=(2,))
def test_a_hook_of_one_rank_lets_no_rank_wait(hooked: int, native: bool) -> None:
    collectives = new_native if native else three_ways.new_collectives
    with mock.patch.object(three_ways, "new_collectives", collectives):
        model, optimizer, pipeline = _hooked(delays=None)
    seen: list[bool] = []

    def look(*_: Any) -> None:
        seen.extend(one.grad is not None for one in model.parameters())

    if dist.get_rank() == hooked:
        common = register_optimizer_step_pre_hook(look)
    with _told("gathers the mean gradient") as texts:
        train_steps(pipeline, model, range(3))
    assert len(texts) == (dist.get_rank() == 0)
    assert all(seen)
    assert len(seen) == (18 if dist.get_rank() == hooked else 0)
    if dist.get_rank() == hooked:
        common.remove()
    pipeline.detach()
    for a, b in zip(weights(model), _plain(3), strict=True):
        assert torch.equal(a, b)


@distributed(world_sizes=(2,))
def test_a_hook_that_comes_after_the_round_is_told_that_it_misses_the_mean_once() -> None:
    model, optimizer, pipeline = _hooked()
    train_steps(pipeline, model, [0])
    seen: list[bool] = []

    def register(_: int) -> None:
        pipeline.parts[0].mean.norm()
        if dist.get_rank() == 1 and not seen:
            optimizer.register_step_pre_hook(lambda *_: seen.append(_has_gradient(model)))

    with _told("find no gradient") as texts:
        train_steps(pipeline, model, range(1, 4), between=register)
    assert len(texts) == (dist.get_rank() == 1)
    assert seen == ([False, True, True] if dist.get_rank() == 1 else [])
    pipeline.detach()


@distributed(world_sizes=(2,))
def test_nothing_is_gathered_for_hooks_if_they_are_not_to_be_shown_it() -> None:
    def gathered(*, is_hooked: bool) -> int:
        model, optimizer, pipeline = _hooked(delays=None)
        pipeline.parts[0].shows_in_hooks = not is_hooked
        seen: list[bool] = []
        if is_hooked:
            optimizer.register_step_pre_hook(lambda *_: seen.append(_has_gradient(model)))
        with _told("gradient") as texts:
            train_steps(pipeline, model, range(3))
        assert texts == []
        assert seen == [False] * 3 * is_hooked
        pipeline.detach()
        return pipeline.collectives.ledger["all_gather"]

    assert gathered(is_hooked=True) == gathered(is_hooked=False)


@distributed(world_sizes=(1, 2))
def test_a_pre_hook_sees_the_users_groups_and_the_values_of_the_last_step() -> None:
    model, optimizer, pipeline = _hooked()
    held = [one for group in optimizer.param_groups for one in group["params"]]
    seen: list[list[Tensor]] = []

    def look(optimizer: Optimizer, *_: Any) -> None:
        assert [id(one) for group in optimizer.param_groups for one in group["params"]] == [
            id(one) for one in held
        ]
        seen.append([one.detach().clone() for one in held])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _step_by_closure(pipeline, model, optimizer, 0)
        common = register_optimizer_step_pre_hook(look)
        optimizer.register_step_pre_hook(look)
        for number in range(1, 3):
            # Nothing has been read since the step before.
            before = len(seen)
            _step_by_closure(pipeline, model, optimizer, number)
            assert len(seen) == before + 2
            _assert_equal_on_ranks(seen[-1])
            assert all(map(torch.equal, seen[-1], seen[-2]))
        common.remove()
    assert not all(map(torch.equal, seen[0], seen[-1]))
    pipeline.detach()


@distributed(world_sizes=(2,))
def test_another_backward_is_refused_where_a_hook_would_see_another_sum() -> None:
    model, optimizer, pipeline = _hooked()
    train_steps(pipeline, model, [0])
    bias = cast(Any, model.layers[0].bias)
    handle = bias.register_post_accumulate_grad_hook(lambda one: None)

    def backward(number: int, synchronize: bool | None) -> None:
        with pipeline.forward():
            loss = loss_of(model, *batch("mlp", number, dist.get_rank()))
        with pipeline.backward(synchronize=synchronize):
            loss.backward()

    for first in (True, None):
        optimizer.zero_grad()
        backward(1, first)
        with pytest.raises(RuntimeError, match=r"has a post-acc.*block_backward"):
            backward(2, True)
    optimizer.zero_grad()
    backward(1, False)
    backward(2, None)
    optimizer.step()
    handle.remove()
    backward(3, True)
    backward(4, True)
    optimizer.step()
    pipeline.detach()


@distributed(world_sizes=(2,))
def test_gradients_are_sent_in_backward_after_parameters_were_of_another_dtype() -> None:
    model, _, pipeline = _hooked()
    begun: list[bool] = []

    def look(_: int) -> None:
        active = pipeline.parts[0].plans.active
        begun.append(active is not None and active.round.has_begun)

    train_steps(pipeline, model, range(2), between=look)
    model.double()
    model.float()
    train_steps(pipeline, model, range(2, 5), between=look)
    # One backward finds no hook, since autograd has forgotten them; then they are there again.
    assert begun[1:] == [True, False, True, True]
    pipeline.detach()
    for a, b in zip(weights(model), _plain(5), strict=True):
        assert torch.equal(a, b)


def test_torch_keeps_hooks_where_they_are_looked_for() -> None:
    parameter: Any = nn.Parameter(torch.zeros(1))
    assert not parameter._post_accumulate_grad_hooks
    handle = parameter.register_post_accumulate_grad_hook(lambda one: None)
    assert parameter._post_accumulate_grad_hooks
    handle.remove()
    assert not parameter._post_accumulate_grad_hooks
    optimizer = torch.optim.SGD([parameter])
    common = register_optimizer_step_pre_hook(lambda *_: None)
    # Trainings of other tests, in the same process, may have left hooks.
    assert [*common.hooks_dict_ref()][-1] == common.id
    own = optimizer.register_step_pre_hook(lambda *_: None)
    assert list(optimizer._optimizer_step_pre_hooks) == [own.id]
    assert own.hooks_dict_ref() is optimizer._optimizer_step_pre_hooks
    behind = optimizer.register_step_post_hook(lambda *_: None)
    assert behind.hooks_dict_ref() is optimizer._optimizer_step_post_hooks
    common.remove()


def test_hooks_of_all_optimizers_may_change_while_a_step_waits() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    waited: list[bool] = []

    def wait() -> None:
        # As another training does that begins or ends meanwhile.
        register_optimizer_step_pre_hook(lambda *_: None).remove()
        waited.append(True)

    hooks = StepHooks(optimizer, wait, lambda: None, lambda *_: None)
    optimizer.step()
    assert waited == [True]
    hooks.remove()


def test_hooks_of_a_step_keep_their_places() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    said: list[str] = []

    def say(what: str) -> Any:
        return lambda *_: said.append(what) and None

    handles = [
        register_optimizer_step_pre_hook(say("common")),
        optimizer.register_step_pre_hook(say("own")),
        optimizer.register_step_post_hook(say("behind")),
    ]
    recorder = _Recorder(said)
    hooks = StepHooks(optimizer, recorder.before, recorder.begin, recorder.end)
    assert hooks.are_in_front
    assert hooks.are_behind
    handles.append(optimizer.register_step_pre_hook(say("late")))
    handles.append(register_optimizer_step_pre_hook(say("late, common")))
    other = StepHooks(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), *recorder.three)
    optimizer.step()
    pre = ["before", "common", "late, common", "own", "late", "begin"]
    assert said == [*pre, "end", "behind"]
    for handle in handles:
        handle.remove()
    for one in (hooks, other):
        assert not one.are_in_front
        assert not one.are_behind
    other.remove()
    hooks.remove()
    said.clear()
    optimizer.step()
    assert said == []


class _Recorder:
    def __init__(self, said: list[str]) -> None:
        self.said = said
        self.three = self.before, self.begin, self.end

    def before(self) -> None:
        self.said.append("before")

    def begin(self, *_: Any) -> None:
        self.said.append("begin")

    def end(self, *_: Any) -> None:
        self.said.append("end")
