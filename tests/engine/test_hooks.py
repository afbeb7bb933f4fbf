"""Hooks that others register: when they run beside ours, and what is in `.grad` then."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_dear.bucket import allocate
from lightning_dear.collectives.streams import Streams
from lightning_dear.collectives.work import Signal, Work
from lightning_dear.compression import Int8
from lightning_dear.engine.gradient_reducer import GradientReducer
from lightning_dear.engine.hooks import StepHooks
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.engine.shared_options import SharedOptions
from lightning_dear.exchange import DenseExchange
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import NoFusion, TensorSpec
from tests.distributed.harness import distributed
from tests.training import three_ways
from tests.training.delays import Delays
from tests.training.models import batch, build, loss_of, optimizer_for, weights
from tests.training.three_ways import new_native, new_pipeline, train_steps

LATE = Delays(before_all_gather_s=0.02)


def _shown(
    delays: Delays | None = LATE, options: ExchangeOptions | None = None
) -> tuple[nn.Module, Optimizer, Pipeline]:
    torch.manual_seed(0)
    model = build("mlp")
    optimizer = optimizer_for("sgd", model)
    pipeline = new_pipeline(model, optimizer, delays=delays, options=options)
    pipeline.parts[0].shows_gradients = True
    return model, optimizer, pipeline


def _plain(
    num_steps: int, options: ExchangeOptions | None = None, delays: Delays | None = LATE
) -> list[Tensor]:
    model, _, pipeline = _shown(delays, options)
    train_steps(pipeline, model, range(num_steps))
    pipeline.detach()
    return weights(model)


def _gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if one.grad is None else one.grad.clone() for one in model.parameters()]


def _assert_equal_on_ranks(tensors: Sequence[Tensor]) -> None:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, list(tensors))
    for other in everyone:
        assert all(map(torch.equal, everyone[0], other))


@pytest.mark.filterwarnings("ignore:strategy='dear' gathers the mean gradient")
@distributed(world_sizes=(2, 3))
def test_hooks_on_one_rank_only_find_the_mean_until_they_are_removed() -> None:
    model, optimizer, pipeline = _shown()
    seen: list[list[Tensor | None]] = []
    handles: list[Any] = []
    if dist.get_rank() == 1:
        handles = [
            register(lambda *_: seen.append(_gradients(model)))
            for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook)
        ]
    train_steps(pipeline, model, range(2))
    # Everybody has what DDP leaves behind, although only one rank asked for it.
    left = _gradients(model)
    assert all(one is not None for one in left)
    _assert_equal_on_ranks(cast(list[Tensor], left))
    assert len(seen) == 2 * len(handles)
    for entry in seen:
        assert all(one is not None for one in entry)
    for handle in handles:
        handle.remove()
    train_steps(pipeline, model, range(2, 4))
    assert all(one.grad is None for one in model.parameters())
    pipeline.detach()
    for a, b in zip(weights(model), _plain(4), strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:strategy='dear' gathers the mean gradient")
@distributed(world_sizes=(1, 2))
def test_hooks_that_only_look_change_no_bit_of_what_is_encoded() -> None:
    for gather in ("parameters", "gradients"):
        options = ExchangeOptions(gather, codec=Int8())
        expected = _plain(5, options)
        model, optimizer, pipeline = _shown(options=options)
        optimizer.register_step_post_hook(lambda *_: None)
        train_steps(pipeline, model, range(5))
        pipeline.detach()
        for a, b in zip(weights(model), expected, strict=True):
            assert torch.equal(a, b), gather


@distributed(world_sizes=(1, 2))
def test_a_pre_hook_sees_the_users_groups_and_the_values_of_the_last_step() -> None:
    model, optimizer, pipeline = _shown()
    held = [one for group in optimizer.param_groups for one in group["params"]]
    seen: list[list[Tensor]] = []

    def look(optimizer: Optimizer, *_: Any) -> None:
        assert [id(one) for group in optimizer.param_groups for one in group["params"]] == [
            id(one) for one in held
        ]
        seen.append([one.detach().clone() for one in held])

    def step(number: int) -> None:
        def closure() -> Tensor:
            with pipeline.forward():
                loss = loss_of(model, *batch("mlp", number, dist.get_rank()))
            optimizer.zero_grad()
            with pipeline.backward():
                loss.backward()
            return loss

        optimizer.step(closure)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(0)
        common = register_optimizer_step_pre_hook(look)
        optimizer.register_step_pre_hook(look)
        for number in range(1, 3):
            # Nothing has been read since the step before.
            before = len(seen)
            step(number)
            assert len(seen) == before + 2
            _assert_equal_on_ranks(seen[-1])
            assert all(map(torch.equal, seen[-1], seen[-2]))
        common.remove()
    assert not all(map(torch.equal, seen[0], seen[-1]))
    pipeline.detach()


@distributed(world_sizes=(2,))
def test_hooks_that_come_when_gradients_are_reduced_are_refused() -> None:
    model, optimizer, pipeline = _shown()
    train_steps(pipeline, model, [0])

    def register(_: int) -> None:
        pipeline.parts[0].reduce()
        optimizer.register_step_pre_hook(lambda *_: None)

    with pytest.raises(RuntimeError, match="SGD cannot be shown .* Register them .* before the"):
        train_steps(pipeline, model, [1], between=register)
    # From the next backward on it is as if they had always been there.
    with (
        pytest.warns(UserWarning, match="for hooks of the step of SGD")
        if (dist.get_rank() == 0)
        else warnings.catch_warnings()
    ):
        train_steps(pipeline, model, [2])
    assert all(one.grad is not None for one in model.parameters())
    pipeline.detach()


@distributed(world_sizes=(2,), keeps_ranks=False)
def test_hooks_on_all_ranks_are_shown_gradients_where_flags_are_not_read_freely() -> None:
    three_ways.new_collectives = new_native
    expected = _plain(4, delays=None)
    model, optimizer, pipeline = _shown(delays=None)
    seen: list[list[Tensor | None]] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(_gradients(model)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train_steps(pipeline, model, range(4))
    pipeline.detach()
    assert len(seen) == 4
    assert all(one is not None for entry in seen for one in entry)
    for a, b in zip(weights(model), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("reads_freely", "own", "heard", "granted"),
    [
        (True, False, 1, False),
        (True, False, 2, True),
        (True, True, 2, True),
        (False, True, 0, True),
        # Another rank has none, and does not read what is said.
        (False, True, 1, False),
        (False, False, 1, False),
    ],
)
def test_a_wish_is_granted_where_all_ranks_hear_of_it(
    reads_freely: bool, own: bool, heard: int, granted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []

    def launch_any(flags: Tensor) -> Work:
        kept.append(int(flags[-3]))
        flags[-3] = heard
        return Work.done()

    collectives: Any = SimpleNamespace(
        reads_flags_freely=reads_freely,
        rank=0,
        world_size=2,
        signal=Signal(),
        streams=Streams(),
        launch_any=launch_any,
    )
    model = nn.Linear(1, 1, bias=False)
    tensor = TensorSpec(0, "weight", 1, 4, "float32", 0, 0)
    plan = NoFusion().plan([tensor], 2)
    some = [model.weight]
    buffers = allocate(plan, some, 0, lambda _: 0, 2, keeps_gradients=True, lags=False)
    exchange = DenseExchange(collectives)
    monkeypatch.setattr(exchange, "launch_reduce", lambda bucket: Work.done())
    shared = SharedOptions(optimizer_for("sgd", model), 0, collectives)
    waiting = cast(Any, lambda reason: nullcontext())
    reducer = GradientReducer(buffers, ["weight"], [1], plan, exchange, (), waiting, shared)
    model.weight.grad = torch.ones_like(model.weight)
    reducer.wishes = own
    assert reducer.reduce() == [True]
    assert kept == [1 if not own else 2 if reads_freely else 0]
    assert reducer.granted == granted


@distributed(world_sizes=(2,))
def test_another_backward_is_refused_where_a_hook_would_see_another_sum() -> None:
    model, optimizer, pipeline = _shown()
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
        with pytest.raises(RuntimeError, match=r"'layers\.0\.bias' has a post-acc.*block_backward"):
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
    model, _, pipeline = _shown()
    begun: list[bool] = []

    def look(_: int) -> None:
        active = pipeline.parts[0].plans.active
        begun.append(active is not None and active.reducer.has_begun)

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
    assert list(common.hooks_dict_ref()) == [common.id]
    own = optimizer.register_step_pre_hook(lambda *_: None)
    assert list(optimizer._optimizer_step_pre_hooks) == [own.id]
    assert own.hooks_dict_ref() is optimizer._optimizer_step_pre_hooks
    behind = optimizer.register_step_post_hook(lambda *_: None)
    assert behind.hooks_dict_ref() is optimizer._optimizer_step_post_hooks
    common.remove()


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
