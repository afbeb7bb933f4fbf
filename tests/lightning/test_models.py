"""Models that read weights in unusual ways, and fits that end in unusual ways."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.distributed.harness import distributed
from tests.lightning.fitting import STRATEGIES, assert_same, fit
from tests.lightning.nets import Net, copies


class _Recurrent(nn.Module):
    """An LSTM reads its weights through a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(67, 32)
        self.lstm = nn.LSTM(32, 40, 2, batch_first=True)
        self.head = nn.Linear(40, 67)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


class _Functional(nn.Module):
    """Modules that never run themselves, and a list of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 50, bias=False)
        self.second = nn.Linear(50, 50, bias=False)
        self.last = nn.Linear(50, 3)
        self.held = [self.second.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.linear(F.linear(x, self.first.weight), self.held[0]))


class _Checkpointed(nn.Module):
    """The middle runs again in backward."""

    def __init__(self, is_reentrant: bool) -> None:
        super().__init__()
        self.is_reentrant = is_reentrant
        self.first = nn.Linear(7, 50)
        self.middle = nn.Sequential(nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 50))
        self.last = nn.Linear(50, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.middle, self.first(x), use_reentrant=self.is_reentrant)
        return self.last(hidden)


class _BackwardOrder(nn.Module):
    """Registered in the reverse of the order in which it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(60, 3)
        self.second = nn.Linear(50, 60)
        self.first = nn.Linear(7, 50)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "recurrent": _Recurrent,
    "functional": _Functional,
    "checkpointed": lambda: _Checkpointed(False),
    "checkpointed, reentrant": lambda: _Checkpointed(True),
    "backward order": _BackwardOrder,
    "channels last": lambda: nn.Sequential(
        nn.Conv2d(1, 24, 3), nn.Conv2d(24, 24, 3), nn.Flatten(), nn.Linear(384, 10)
    ).to(memory_format=torch.channels_last),
}
DATA = {"recurrent": "gpt", "channels last": "conv"}


@pytest.mark.parametrize("name", MODELS)
@distributed(world_sizes=[2])
def test_models_equal_ddp_when_nobody_looks(name: str) -> None:
    nets = {}
    for strategy_name, strategy in STRATEGIES.items():
        nets[strategy_name] = net = Net("mlp", "adamw")
        torch.manual_seed(1)
        net.net = MODELS[name]()
        fit(strategy(), net, model=DATA.get(name, "mlp"), num_samples=32)
    assert_same(nets["dear"].losses, nets["ddp"].losses, "loss")
    assert_same(copies(nets["dear"]), copies(nets["ddp"]), "weights after fit")


class _Interrupt(Callback):
    """Ctrl-C on all ranks, as a terminal sends it."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            raise KeyboardInterrupt


class _Copier(Callback):
    """Copies and pickles the module between two steps."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        copied = copy.deepcopy(pl_module.net)
        pickled = pickle.loads(pickle.dumps(pl_module.net))
        assert_same(copies(copied), copies(pl_module), "copied weights")
        assert_same(copies(pickled), copies(pl_module), "pickled weights")


FITS: dict[str, tuple[list[type[Callback]], dict[str, Any]]] = {
    "interrupted": ([_Interrupt], {}),
    "copied": ([_Copier], {}),
    "no step": ([], {"max_steps": 0}),
    "no batch": ([], {"limit_train_batches": 0}),
    "one step": ([], {"max_steps": 1}),
    "fast_dev_run": ([], {"fast_dev_run": 2}),
    "overfit_batches": ([], {"overfit_batches": 2}),
    "detect_anomaly": ([], {"detect_anomaly": True}),
}


@pytest.mark.parametrize("name", FITS)
@distributed(world_sizes=[2])
def test_fits_end_as_under_ddp(name: str) -> None:
    callbacks, options = FITS[name]
    nets = {}
    for strategy_name, strategy in STRATEGIES.items():
        nets[strategy_name] = Net("gpt", "adamw")
        with suppress(KeyboardInterrupt, SystemExit):
            fit(
                strategy(),
                nets[strategy_name],
                *(kind() for kind in callbacks),
                model="gpt",
                **options,
            )
    assert_same(nets["dear"].losses, nets["ddp"].losses, "loss")
    assert_same(copies(nets["dear"]), copies(nets["ddp"]), "weights after fit")
