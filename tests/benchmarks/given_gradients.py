"""What is trained to see what travels: small real models, and gradients that are hard to send."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dear.compression.sparse_all_reduce import FEWEST_PER_RANK

STEPS_AT_A_PLACE = 37
"""After so many steps the large numbers of "skewed" lie elsewhere."""

NUM_IMAGES, NUM_WINDOWS, NUM_BYTES = 16, 4, 32


class Training(NamedTuple):
    """A model, alike on all ranks, and what this rank's loss is in a step."""

    model: nn.Module
    loss_of: Callable[[int], Tensor]


class Place(NamedTuple):
    """Whose gradients are asked for: of which rank, in which step."""

    rank: int
    num_ranks: int
    step: int

    def generator(self) -> torch.Generator:
        """Another one for each."""
        return torch.Generator().manual_seed(self.step * self.num_ranks + self.rank)


# --- real ones ------------------------------------------------------------------------------------


def _digits() -> Training:
    """175,000 parameters."""
    from lightning_dear.workloads.data import DigitsDataModule
    from lightning_dear.workloads.nets import ResNet

    data: Any = DigitsDataModule()
    data.setup("fit")
    images, labels = data.train_set.tensors
    model = ResNet(channels=(16, 32, 64))

    def loss_of(step: int) -> Tensor:
        generator = _place(step).generator()
        chosen = torch.randint(len(images), (NUM_IMAGES,), generator=generator)
        return F.cross_entropy(model(images[chosen]), labels[chosen])

    return Training(model, loss_of)


def _gpt() -> Training:
    """134,000 parameters."""
    from lightning_dear.workloads.data import SourceCorpusDataModule
    from lightning_dear.workloads.nets import GPT

    data: Any = SourceCorpusDataModule(context_length=NUM_BYTES)
    data.setup("fit")
    windows = data.train_set
    model = GPT(context_length=NUM_BYTES, width=64, num_layers=2)

    def loss_of(step: int) -> Tensor:
        generator = _place(step).generator()
        chosen = torch.randint(len(windows), (NUM_WINDOWS,), generator=generator)
        text = torch.stack([windows[number] for number in chosen.tolist()]).long()
        return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    return Training(model, loss_of)


# --- given ones -----------------------------------------------------------------------------------


class Given(nn.Module):
    """Its loss is all parameters times given numbers, which are thus the gradients.

    Args:
        numel: How many parameters there are.
    """

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, gradients: Tensor) -> Tensor:
        """The sum of the products."""
        return (self.weight * gradients).sum()


def _skewed(numel: int, place: Place) -> Tensor:
    """All large numbers in one hundredth of the bucket, the same on all ranks."""
    numbers = torch.randn(numel, generator=place.generator()) * 1e-3
    generator = torch.Generator().manual_seed(place.step // STEPS_AT_A_PLACE)
    width = max(1, numel // 100)
    begin = int(torch.randint(numel - width + 1, (1,), generator=generator))
    numbers[begin : begin + width] *= 1e3
    return numbers


def _one_rank(numel: int, place: Place) -> Tensor:
    """Zeros on all ranks but the last."""
    if place.rank < place.num_ranks - 1:
        return torch.zeros(numel)
    return _normal(numel, place)


def _ties(numel: int, place: Place) -> Tensor:
    """All equal in size, the same on all ranks: of each size in a residual there are many."""
    signs = torch.ones(numel)
    signs[1::2] = -1.0
    return signs


def _zeros(numel: int, place: Place) -> Tensor:
    return torch.zeros(numel)


def _normal(numel: int, place: Place) -> Tensor:
    return torch.randn(numel, generator=place.generator())


SHORT = "short"
"""So few numbers that it saves nothing to send some of them."""

REAL = {"digits": _digits, "gpt": _gpt}
GIVEN = {
    "skewed": _skewed,
    "one_rank": _one_rank,
    "ties": _ties,
    "zeros": _zeros,
    SHORT: _normal,
}
NAMES = (*REAL, *GIVEN)


def training_of(name: str, numel: int, density: float) -> Training:
    """What is called so, on this rank.

    Args:
        name: One of `NAMES`.
        numel: Of given gradients; fewer if they are to be short.
        density: Share of them that travels.
    """
    torch.manual_seed(0)
    if name in REAL:
        return REAL[name]()
    if name == SHORT:
        most = FEWEST_PER_RANK * dist.get_world_size() - 1
        numel = min(numel, int(most / density))
    model = Given(numel)
    return Training(model, partial(_given_loss, model, GIVEN[name]))


def _given_loss(model: Given, make: Callable[[int, Place], Tensor], step: int) -> Tensor:
    loss: Tensor = model(make(model.weight.numel(), _place(step)))
    return loss


def _place(step: int) -> Place:
    return Place(dist.get_rank(), dist.get_world_size(), step)
