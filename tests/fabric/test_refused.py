"""What `Fabric(strategy="dear")` refuses, and in which words."""

from __future__ import annotations

from inspect import signature
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.registry import _StrategyRegistry
from torch import nn

from lightning_dear import DearStrategy
from lightning_dear.fabric import DearFabricStrategy
from lightning_dear.registration import START_METHODS
from tests.distributed.harness import distributed
from tests.fabric.running import dear, new_fabric
from tests.training.models import batch, build, loss_of, optimizer_for

TOPK: dict[str, Any] = {"compressor": "topk"}
GATHERED: dict[str, Any] = {"compressor": "qsgd", "gather": "gradients"}


@pytest.mark.parametrize("name", START_METHODS)
def test_names_give_the_strategy(name: str) -> None:
    strategy = Fabric(strategy=name, accelerator="cpu", devices=2).strategy
    assert type(strategy) is DearFabricStrategy
    assert isinstance(strategy, DDPStrategy)
    assert strategy._start_method == START_METHODS[name]


def test_names_are_those_that_the_class_registers() -> None:
    registry = _StrategyRegistry()
    DearFabricStrategy.register_strategies(registry)
    assert registry.available_strategies() == list(START_METHODS)
    assert type(registry.get("dear")) is DearFabricStrategy


def test_one_process_has_no_launcher() -> None:
    assert Fabric(strategy="dear", accelerator="cpu", devices=1).strategy.launcher is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"static_graph": True}, "static_graph"),
        ({"ddp_comm_hook": print}, "compressor="),
        ({"nonsense": 1}, "unknown option"),
        ({"compression_schedule": None}, "needs a Trainer, which counts steps"),
        ({"save_distributed_checkpoint": True}, r"needs a Trainer; fabric\.save"),
        ({"gather": "weights"}, "valid names: parameters, gradients"),
        ({"fusion": "nonsense"}, "threshold"),
        ({"fusion": "auto"}, "FixedPlan"),
        ({"compressor": "nonsense"}, "none"),
    ],
)
def test_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DearFabricStrategy(**options)


def test_options_are_those_of_a_trainers_strategy_or_refused_with_a_reason() -> None:
    """With the same defaults and types: they are described there alone."""
    ours = dict(signature(DearFabricStrategy).parameters)
    theirs = dict(signature(DearStrategy).parameters)
    del ours["precision"], theirs["precision_plugin"]
    assert {name: theirs[name] for name in ours} == ours
    for name in theirs.keys() - ours.keys():
        with pytest.raises(ValueError, match=rf"{name} \(it needs a Trainer"):
            DearFabricStrategy(**{name: theirs[name].default})


def _loss(fabric: Fabric, model: nn.Module) -> torch.Tensor:
    return loss_of(model, *batch("mlp", 0, fabric.global_rank))


@distributed([2])
def test_an_optimizer_alone_is_refused() -> None:
    fabric = new_fabric(dear())
    raw = build("mlp", seed=fabric.global_rank)
    model = fabric.setup_module(raw)
    with pytest.raises(RuntimeError, match=r"fabric\.setup\(model, optimizer\)"):
        fabric.setup_optimizers(optimizer_for("sgd", raw))
    first = fabric.broadcast(raw.layers[0].weight.detach())
    assert torch.equal(raw.layers[0].weight, first)
    with torch.no_grad():
        _loss(fabric, model)


@distributed([2])
def test_two_optimizers_with_all_reduces_are_refused() -> None:
    fabric = new_fabric(dear(compressor="powersgd"))
    first, second = build("mlp"), build("mlp")
    model, _ = fabric.setup(first, optimizer_for("sgd", first))
    with pytest.raises(ValueError, match="compressor='powersgd' works with one optimizer"):
        fabric.setup(second, optimizer_for("sgd", second))
    # The same module again is another training of one optimizer.
    model, optimizer = fabric.setup(first, optimizer_for("sgd", first))
    fabric.backward(_loss(fabric, model))
    optimizer.step()


@distributed([1])
def test_people_hear_what_a_compressor_has_chosen() -> None:
    raw = build("mlp")
    options: dict[str, Any]
    for options, expected in (({"compressor": "qsgd"}, 1), (GATHERED, 0), (TOPK, 2)):
        with patch("lightning_dear.strategy.refusals.rank_zero_info") as said:
            new_fabric(dear(**options)).setup(raw, optimizer_for("sgd", raw))
        assert said.call_count == expected


@distributed([2])
def test_gradients_without_an_optimizer_are_refused() -> None:
    fabric = new_fabric(dear())
    raw = build("mlp")
    frozen = fabric.setup(raw.requires_grad_(False))
    inputs = torch.randn(5, 7, requires_grad=True)
    fabric.backward(loss_of(frozen, inputs, torch.zeros(5, dtype=torch.long)))
    assert inputs.grad is not None
    raw.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"'layers\.\d\.\w+' of a UnevenMLP .*no_grad"):
        fabric.backward(_loss(fabric, frozen))


@distributed([2])
def test_a_parameter_in_two_models_is_refused() -> None:
    fabric = new_fabric(dear())
    raw = build("mlp")
    kept = fabric.setup(raw, optimizer_for("sgd", raw))
    both = nn.Sequential(raw, nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"'0\.layers\.0\.weight' .* UnevenMLP .* before"):
        fabric.setup(both, optimizer_for("sgd", both))
    assert len(kept) == 2


@distributed([2])
def test_a_fused_optimizer_with_a_loss_scale_is_refused() -> None:
    scaler = torch.amp.GradScaler("cpu")
    fabric = new_fabric(dear(), MixedPrecision("16-mixed", "cpu", scaler))
    raw = build("mlp")
    with pytest.raises(ValueError, match="fused=False"):
        fabric.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1, fused=True))


class _Replacing(MixedPrecision):
    """Keeps layers of its own."""


@distributed([2])
def test_other_precisions_are_refused() -> None:
    fabric = new_fabric(dear(), _Replacing("bf16-mixed", "cpu"))
    raw = build("mlp")
    with pytest.raises(ValueError, match="_Replacing .*bf16-true"):
        fabric.setup(raw, optimizer_for("sgd", raw))


@distributed([2])
def test_a_different_model_on_a_rank_is_refused() -> None:
    fabric = new_fabric(dear())
    raw = nn.Linear(3, 3 + fabric.global_rank)
    with pytest.raises(ValueError, match="Ranks hold different models"):
        fabric.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="Ranks hold different models"):
        fabric.setup(raw)


@distributed([1, 2])
def test_an_infinite_norm_is_refused() -> None:
    fabric = new_fabric(dear())
    raw = build("mlp")
    model, optimizer = fabric.setup(raw, optimizer_for("sgd", raw))
    factor = float("inf") if fabric.global_rank == 0 else 1.0
    fabric.backward(_loss(fabric, model) + raw.layers[0].bias[0] * factor)
    with pytest.raises(RuntimeError, match="error_if_nonfinite=False"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    norm = fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
    assert norm.isinf()


@distributed([2])
def test_unclear_questions_are_refused() -> None:
    fabric = new_fabric(dear())
    strategy: Any = fabric.strategy
    with pytest.raises(RuntimeError, match="Nothing is being trained"):
        strategy.grad_norm()
    one, other = build("mlp"), build("mlp")
    kept = fabric.setup(one, optimizer_for("sgd", one))
    assert strategy.plan is None
    also = fabric.setup(other, optimizer_for("sgd", other))
    with pytest.raises(ValueError, match="Several models"):
        strategy.grad_norm()
    with pytest.raises(ValueError, match="was not set up"):
        strategy.grad_norm(optimizer_for("sgd", other))
    fabric.backward(_loss(fabric, kept[0]))
    assert strategy.grad_norm(kept[1]) > 0
    assert strategy.pipeline_of(also[1]) is not strategy.pipeline_of(kept[1])


@distributed([2])
def test_no_backward_sync_wants_what_setup_returned() -> None:
    fabric = new_fabric(dear())
    with pytest.raises(TypeError, match="set up the model first"):
        fabric.no_backward_sync(build("mlp"))
    control = fabric.strategy._backward_sync_control
    assert control is not None
    with pytest.raises(TypeError, match=r"got a UnevenMLP. Pass what fabric"):
        control.no_backward_sync(build("mlp"), True)


@distributed([2])
def test_plain_backward_is_refused() -> None:
    fabric = new_fabric(dear())
    raw = build("mlp")
    model, _ = fabric.setup(raw, optimizer_for("sgd", raw))
    with pytest.raises(RuntimeError, match=r"fabric\.backward\(loss\)"):
        _loss(fabric, model).backward()


@distributed([2])
def test_ranks_that_step_with_other_options_are_refused() -> None:
    fabric = new_fabric(dear())
    raw = build("mlp")
    model, optimizer = fabric.setup(raw, optimizer_for("sgd", raw))
    optimizer.param_groups[1]["lr"] = 0.01 * (1 + fabric.global_rank)
    with pytest.raises(ValueError, match="SGD 0, parameter group 1: lr is 0.01 on rank 0 and 0.02"):
        fabric.backward(loss_of(model, *batch("mlp", 0, fabric.global_rank)))
