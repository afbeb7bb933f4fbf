"""What cannot work is refused before training, on every rank, in a sentence with the remedy."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.optim import Optimizer

from lightning_dear import DearStrategy
from tests.distributed.calls import Raised
from tests.distributed.harness import observe_ranks
from tests.lightning.fitting import dear, fit
from tests.lightning.nets import Net

TIMEOUT_S = 25


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compressor": "topkk"}, "Unknown compressor 'topkk'; valid names: none"),
        ({"fusion": "thresh"}, "Unknown fusion 'thresh'; valid names: threshold, none, single"),
        ({"gather": "weights"}, "Unknown gather 'weights'; valid names: parameters"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb must be > 0 MiB, got 0"),
        ({"bucket_cap_mb": -1.0}, "bucket_cap_mb must be > 0 MiB, got -1.0"),
        ({"bucket_cap_mb": float("nan")}, "bucket_cap_mb must be > 0 MiB, got nan"),
        ({"fusion": "single", "bucket_cap_mb": 4}, "bucket_cap_mb=4 has no effect with fusion="),
        ({"ddp_comm_hook": print}, "does not take ddp_comm_hook"),
        ({"static_graph": True}, "does not take static_graph"),
        ({"gradient_as_bucket_view": True}, "does not take gradient_as_bucket_view"),
        ({"model_averaging_period": 4}, "does not take model_averaging_period"),
        ({"bucket_cap": 4}, "does not take bucket_cap (unknown option)"),
    ],
)
def test_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        DearStrategy(**options)


def test_a_refusal_names_all_options_and_the_remedy() -> None:
    with pytest.raises(ValueError, match="static_graph.*ddp_comm_hook.*strategy='ddp'"):
        DearStrategy(static_graph=True, ddp_comm_hook=print)


class Lars(Optimizer):
    """Scales a tensor's step by its norm: not element-wise, and not known by name."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad * (group["lr"] * p.norm() / (p.grad.norm() + 1e-9)))
        return loss


class HomeMadeLars(Lars):
    """Under a name that no list knows."""


class _UntouchedNet(Net):
    """Fails the test if it is ever trained."""

    def __init__(self, new_optimizer: Callable[[nn.Module], Any], model: str = "mlp") -> None:
        super().__init__(model)
        self.new_optimizer = new_optimizer

    def training_step(self, *_: Any) -> Any:
        raise AssertionError("training began")

    def configure_optimizers(self) -> Any:
        return self.new_optimizer(self.net)


def _sgd(module: nn.Module) -> Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def _foreign(module: nn.Module) -> Optimizer:
    return torch.optim.SGD(nn.Linear(5, 6).parameters(), lr=0.1)


def _frozen(module: nn.Module) -> Optimizer:
    return torch.optim.SGD(module.requires_grad_(False).parameters(), lr=0.1)


def _none(module: nn.Module) -> None:
    return None


def _lbfgs(module: nn.Module) -> Optimizer:
    return torch.optim.LBFGS(module.parameters())


def _adafactor(module: nn.Module) -> Optimizer:
    return torch.optim.Adafactor(module.parameters())


def _muon(module: nn.Module) -> Optimizer:
    return torch.optim.Muon([p for p in module.parameters() if p.dim() == 2])


def _sparse_adam(module: nn.Module) -> Optimizer:
    return torch.optim.SparseAdam(module.parameters())


def _lars(module: nn.Module) -> Optimizer:
    return Lars(module.parameters())


def _home_made_lars(module: nn.Module) -> Optimizer:
    return HomeMadeLars(module.parameters())


def _two(module: nn.Module) -> list[Optimizer]:
    return [_sgd(module), _sgd(module)]


def _fit_refused(new_optimizer: Callable[[nn.Module], Any]) -> None:
    fit(dear(), _UntouchedNet(new_optimizer))


_REFUSED_OPTIMIZERS = [
    (_foreign, "SGD's parameter group 0 holds 2 parameter(s) that are not the module's"),
    (_frozen, "The optimizer holds no parameter of the module that requires a gradient"),
    (_none, "strategy='dear' needs an optimizer"),
    (_lbfgs, "strategy='dear' cannot shard LBFGS"),
    (_adafactor, "strategy='dear' cannot shard Adafactor"),
    (_sparse_adam, "strategy='dear' cannot shard SparseAdam"),
    (_lars, "strategy='dear' cannot shard Lars"),
    (_home_made_lars, "strategy='dear' cannot shard HomeMadeLars: a matrix stepped in two parts"),
]
if hasattr(torch.optim, "Muon"):
    _REFUSED_OPTIMIZERS.append((_muon, "strategy='dear' cannot shard Muon"))


def _assert_all_refuse(fn: Callable[..., None], words: str, *args: Any) -> None:
    outcomes = observe_ranks(fn, 2, *args, timeout_s=TIMEOUT_S)
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, Raised), f"rank {rank}: {outcome}"
        assert outcome.message.startswith("ValueError("), outcome.message
        assert words in outcome.message.replace('\\"', '"').replace("\\'", "'")


@pytest.mark.parametrize(("new_optimizer", "words"), _REFUSED_OPTIMIZERS)
def test_optimizers(new_optimizer: Callable[[nn.Module], Any], words: str) -> None:
    _assert_all_refuse(_fit_refused, words, new_optimizer)


class _TwoOptimizersNet(_UntouchedNet):
    automatic_optimization = False


def _fit_two() -> None:
    fit(dear(), _TwoOptimizersNet(_two))


def test_two_optimizers() -> None:
    _assert_all_refuse(_fit_two, "one optimizer so far, configure_optimizers returned 2")


def _fit_with(options: dict[str, Any]) -> None:
    fit(dear(), _UntouchedNet(_sgd), **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gradient_clip_val": 0.5}, "gradient_clip_val=0.5 has no effect under strategy='dear'"),
        ({"precision": "bf16-true"}, "precision='bf16-true' does not work under strategy='dear'"),
        ({"precision": "16-true"}, "precision='16-true' does not work under strategy='dear'"),
    ],
)
def test_trainer_options(options: dict[str, Any], words: str) -> None:
    _assert_all_refuse(_fit_with, words, options)


def _fit_with_scaler() -> None:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    fit(dear(precision_plugin=plugin), _UntouchedNet(_sgd))


def test_a_gradient_scaler() -> None:
    _assert_all_refuse(_fit_with_scaler, "precision='16-mixed' does not work")


class _ClippingNet(_UntouchedNet):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """Would clip."""


def _fit_clipping_net() -> None:
    fit(dear(), _ClippingNet(_sgd))


def test_a_clipping_hook() -> None:
    _assert_all_refuse(_fit_clipping_net, "_ClippingNet.configure_gradient_clipping would see")


def _fit_different_models(kind: str) -> None:
    net = _UntouchedNet(_sgd)
    if os.environ["RANK"] == "1":
        if kind == "shape":
            net.net.layers[2] = nn.Linear(131, 62)
        elif kind == "number":
            net.net.layers.append(nn.Linear(3, 3))
        else:
            net.new_optimizer = _foreign
    fit(dear(), net)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shape", "Ranks hold different models: rank 0 has"),
        ("number", "Ranks hold different models: rank 0 trains 6 parameters, rank 1 8"),
        ("optimizer", "parameter(s) that are not the module's"),
    ],
)
def test_ranks_that_disagree(kind: str, words: str) -> None:
    """One rank alone is wrong; all say so, and none is left waiting."""
    _assert_all_refuse(_fit_different_models, words, kind)
