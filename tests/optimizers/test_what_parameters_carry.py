"""What an optimizer may know of a parameter besides its numbers: attributes, names, options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_dear.collectives.factory import new_collectives
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.optimizers.tensorwise import why_not_elementwise
from tests.distributed.harness import distributed
from tests.training.models import batch, build, loss_of, weights
from tests.training.three_ways import SMALL_BUCKETS

MODEL, NUM_STEPS = "mlp", 4
SHARDS, WHOLE = ExchangeOptions(), ExchangeOptions("gradients")


class ByParameter(SGD):
    """Calls its closure, and changes each gradient before torch's step."""

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            names = group.get("param_names") or [""] * len(group["params"])
            for name, one in zip(names, group["params"], strict=True):
                if one.grad is not None:
                    self.change(one, name, group)
        super().step()
        return loss

    def change(self, one: Any, name: str, group: dict[str, Any]) -> None:
        """Changes `one.grad` in place."""
        raise NotImplementedError


class ByAttribute(ByParameter):
    """Scales gradients by `scale`, as optimizers of muP do, and by `mask`, if there are any."""

    def change(self, one: Any, name: str, group: dict[str, Any]) -> None:
        one.grad.mul_(getattr(one, "scale", 1.0)).mul_(getattr(one, "mask", 1.0))


class CountsOnParameter(ByParameter):
    """Keeps a counter in an attribute of the parameter."""

    def change(self, one: Any, name: str, group: dict[str, Any]) -> None:
        one.count = getattr(one, "count", 0) + 1
        one.grad.div_(one.count)


class KeepsOnParameter(ByParameter):
    """Keeps its momentum in an attribute of the parameter, which it makes itself."""

    def change(self, one: Any, name: str, group: dict[str, Any]) -> None:
        one.kept = 0.9 * getattr(one, "kept", 0.0) + one.grad
        one.grad.copy_(one.kept)


class ByMode(ByParameter):
    """Normalizes gradients by the whole tensor in one of its modes, or if it is told to."""

    is_normalized = False

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.param_groups[0]["mode"] = "plain"

    def change(self, one: Any, name: str, group: dict[str, Any]) -> None:
        if self.is_normalized or group["mode"] == "norm":
            one.grad.div_(one.grad.norm() + 1)


class ByName(ByParameter):
    """Steps biases with a tenth of the gradient."""

    def change(self, one: Any, name: str, group: dict[str, Any]) -> None:
        one.grad.mul_(0.1 if name.endswith("bias") else 1.0)


class ByIdentity(ByParameter):
    """Looks parameters up in a dict of its own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        held = [one for group in self.param_groups for one in group["params"]]
        self.scales = {id(one): 0.5 if one.ndim > 1 else 1.0 for one in held}

    def change(self, one: Any, name: str, group: dict[str, Any]) -> None:
        one.grad.mul_(self.scales.get(id(one), 1.0))


class DecaysByNorm(ByParameter):
    """Its decay, which a schedule brings, depends on the whole tensor."""

    def change(self, one: Any, name: str, group: dict[str, Any]) -> None:
        if group.setdefault("decay", 0.0):
            one.grad.add_(one.detach() / one.detach().norm(), alpha=group["decay"])


def _with_attributes(model: nn.Module) -> Optimizer:
    for number, one in enumerate(model.parameters()):
        if number % 2:
            one.scale = 0.25  # type: ignore[attr-defined]
        if number % 3:
            mask = torch.arange(one.numel()).view_as(one) % 2
            one.mask = mask.to(one.dtype)  # type: ignore[attr-defined]
    return ByAttribute(model.parameters(), lr=0.05)


def _counting(model: nn.Module) -> Optimizer:
    for one in model.parameters():
        one.count = 0  # type: ignore[attr-defined]
    return CountsOnParameter(model.parameters(), lr=0.05)


def _keeping(model: nn.Module) -> Optimizer:
    return KeepsOnParameter(model.parameters(), lr=0.05)


def _with_rows(model: nn.Module) -> Optimizer:
    for one in model.parameters():
        if one.ndim == 2:
            one.mask = torch.ones(one.shape[1], dtype=one.dtype)  # type: ignore[attr-defined]
    return ByAttribute(model.parameters(), lr=0.05)


def _named(model: nn.Module) -> Optimizer:
    return ByName(model.named_parameters(), lr=0.05)


def _by_identity(model: nn.Module) -> Optimizer:
    return ByIdentity(model.parameters(), lr=0.05)


def _train(
    new: Callable[[nn.Module], Optimizer],
    change: Callable[[Optimizer], None],
    options: ExchangeOptions,
    or_else: ExchangeOptions | None,
) -> list[Tensor]:
    model = build(MODEL, dtype=torch.float64)
    optimizer = new(model)
    how = new_collectives(torch.device("cpu")), SMALL_BUCKETS
    pipeline = Pipeline(model, [optimizer], *how, options=options, or_else=or_else)
    for step in range(NUM_STEPS):
        with pipeline.forward():
            loss = loss_of(model, *batch(MODEL, step, dist.get_rank(), torch.float64))
        with pipeline.backward():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        change(optimizer)
    pipeline.complete_parameters()
    pipeline.detach()
    return weights(model)


def _alone(
    new: Callable[[nn.Module], Optimizer], change: Callable[[Optimizer], None]
) -> list[Tensor]:
    model = build(MODEL, dtype=torch.float64)
    optimizer = new(model)
    for step in range(NUM_STEPS):
        for rank in range(dist.get_world_size()):
            loss = loss_of(model, *batch(MODEL, step, rank, torch.float64))
            (loss / dist.get_world_size()).backward()
        optimizer.step()
        optimizer.zero_grad()
        change(optimizer)
    return weights(model)


def _nothing(optimizer: Optimizer) -> None:
    pass


def _other_scale(optimizer: Optimizer) -> None:
    """Attributes may be replaced, and be put on parameters that had none."""
    for one in optimizer.param_groups[0]["params"]:
        one.scale = 0.5 * getattr(one, "scale", 1.0)


@pytest.mark.parametrize("options", [SHARDS, WHOLE])
@pytest.mark.parametrize("change", [_nothing, _other_scale])
@pytest.mark.parametrize(
    "new", [_with_attributes, _with_rows, _counting, _keeping, _named, _by_identity]
)
@distributed(world_sizes=(1, 2, 3))
def test_it_is_found_as_under_torch(
    new: Callable[[nn.Module], Optimizer],
    change: Callable[[Optimizer], None],
    options: ExchangeOptions,
) -> None:
    ours = _train(new, change, options, WHOLE if options == SHARDS else None)
    for left, right in zip(ours, _alone(new, change), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("new", "why"),
    [
        (_with_attributes, None),
        (_named, None),
        (_counting, "gets other values if it is cut in two"),
        (_keeping, "keeps 'kept' as an attribute of parameters"),
        (_with_rows, "'mask' of a parameter is a tensor of another shape"),
        (_by_identity, "keeps parameters in its attribute 'scales'"),
    ],
)
def test_what_cannot_be_carried_is_stepped_whole(
    new: Callable[[nn.Module], Optimizer], why: str | None
) -> None:
    found = why_not_elementwise(new(build(MODEL)))
    assert (why is None) == (found is None)
    assert why is None or why in str(found)


def _decaying(model: nn.Module) -> Optimizer:
    return DecaysByNorm(model.parameters(), lr=0.05)


def _decay(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["decay"] = 0.1


@distributed(world_sizes=(1, 2))
def test_an_option_that_is_set_later_is_tried_then() -> None:
    with pytest.raises(RuntimeError, match=r"decay of group 0 is set now.*gather='grad"):
        _train(_decaying, _decay, SHARDS, None)


@distributed(world_sizes=(1, 2))
def test_whole_tensors_go_on_with_an_option_that_is_set_later() -> None:
    ours = _train(_decaying, _decay, WHOLE, None)
    for left, right in zip(ours, _alone(_decaying, _decay), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-12)


def _by_mode(model: nn.Module) -> Optimizer:
    return ByMode(model.parameters(), lr=0.05)


def _other_mode(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["mode"] = "norm"


def _switch(optimizer: Optimizer) -> None:
    optimizer.is_normalized = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "what"),
    [(_other_mode, "mode of group 0 norm"), (_switch, "is_normalized of ByMode")],
)
@distributed(world_sizes=(2,))
def test_words_and_switches_that_change_later_are_tried_then(
    change: Callable[[Optimizer], None], what: str
) -> None:
    with pytest.raises(RuntimeError, match=rf"{what}.* is set now.*gather='gradients'"):
        _train(_by_mode, change, SHARDS, None)


def _late_rows(optimizer: Optimizer) -> None:
    one = optimizer.param_groups[0]["params"][0]
    one.mask = torch.ones(one.shape[1], dtype=one.dtype)


@distributed(world_sizes=(2,))
def test_an_attribute_that_comes_late_and_cannot_be_cut_is_named() -> None:
    def plain(model: nn.Module) -> Optimizer:
        return ByAttribute(model.parameters(), lr=0.05)

    with pytest.raises(
        RuntimeError, match="attribute 'mask' of a parameter is a tensor of another"
    ):
        _train(plain, _late_rows, SHARDS, None)
