"""A small classifier under a usual SGD, where most numbers of a gradient may wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import SGD

from lightning_dear.compression import Compressor, RandomK, TopK
from tests.fabric.running import dear, new_fabric

NUM_STEPS = 180

CODECS: Mapping[str, tuple[Compressor | None, float]] = {
    "none": (None, 0.9),
    "randomk": (RandomK(), 0.9),
    "randomk, decay=1": (RandomK(decay=1.0), 0.9),
    "randomk, decay=1, no momentum": (RandomK(decay=1.0), 0.0),
    "topk": (TopK(), 0.9),
}
"""Name -> compressor, and the optimizer's momentum."""

Samples = tuple[Tensor, Tensor]
"""Inputs, [samples, features], and labels, [samples]."""


def clouds(generator: torch.Generator) -> Samples:
    """Points around five centres, each of which is a label."""
    labels = torch.randint(0, 5, (2000,), generator=generator)
    centres = torch.randn(5, 20, generator=generator)
    return centres[labels] + torch.randn(2000, 20, generator=generator), labels


def _teacher(generator: torch.Generator) -> Samples:
    inputs, weight = (torch.randn(n, 32, generator=generator) for n in (2000, 5))
    return inputs, (inputs @ weight.T).argmax(1)


def _digits(generator: torch.Generator) -> Samples:
    inputs, labels = load_digits(return_X_y=True)
    return torch.tensor(inputs / 16).float(), torch.tensor(labels)


DATA: Mapping[str, Callable[[torch.Generator], Samples]] = {
    "digits": _digits,
    "clouds": clouds,
    "teacher": _teacher,
}


def train(
    compressor: Compressor | None,
    momentum: float,
    make: Callable[[torch.Generator], Samples],
    seed: int = 0,
    num_steps: int = NUM_STEPS,
) -> tuple[float, float]:
    """Losses of all samples before and after a training. Collective. Blocks."""
    fabric, criterion = new_fabric(dear(compressor=compressor)), nn.CrossEntropyLoss()
    inputs, labels = make(torch.Generator().manual_seed(1000 + seed))
    torch.manual_seed(seed)
    raw = nn.Sequential(
        nn.Linear(inputs.shape[1], 64),
        nn.LayerNorm(64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.LayerNorm(64),
        nn.ReLU(),
        nn.Linear(64, int(labels.max()) + 1),
    )
    model, optimizer = fabric.setup(raw, SGD(raw.parameters(), lr=0.05, momentum=momentum))
    generator = torch.Generator().manual_seed(7 + seed + 100 * fabric.global_rank)
    with torch.no_grad():
        before = float(criterion(model(inputs), labels))
    for _ in range(num_steps):
        chosen = torch.randint(0, len(inputs), (16,), generator=generator)
        optimizer.zero_grad()
        fabric.backward(criterion(model(inputs[chosen]), labels[chosen]))
        optimizer.step()
    with torch.no_grad():
        return before, float(criterion(model(inputs), labels))


def train_all(name: str, data: str, seeds: list[int]) -> list[tuple[float, float]]:
    """Losses before and after, for each seed."""
    return [train(*CODECS[name], DATA[data], seed) for seed in seeds]
