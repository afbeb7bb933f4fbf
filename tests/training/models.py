"""Small models with awkward shapes, their data and their optimizers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from tests.training.odd_models import ODD_MODELS, Spectral


class UnevenMLP(nn.Module):
    """Sizes that divide by nothing."""

    def __init__(self, sizes: tuple[int, ...] = (7, 131, 61, 3)) -> None:
        super().__init__()
        self.layers = nn.Sequential()
        for inputs, outputs in itertools.pairwise(sizes):
            self.layers.extend([nn.Linear(inputs, outputs), nn.Tanh()])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class MayLeaveOut(nn.Module):
    """May leave out a layer; has BatchNorm's buffers."""

    def __init__(self, width: int = 61) -> None:
        super().__init__()
        self.first = nn.Linear(7, width)
        self.norm = nn.BatchNorm1d(width)
        self.extra = nn.Linear(width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor, uses_extra: bool) -> Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        return self.head(self.extra(x) if uses_extra else x)


class ConvNet(nn.Module):
    """Convolutions with a bias in front of BatchNorm, whose gradient is pure rounding noise."""

    def __init__(self, widths: tuple[int, ...] = (12, 20)) -> None:
        super().__init__()
        self.layers = nn.Sequential()
        for inputs, outputs in itertools.pairwise((1, *widths)):
            self.layers.extend(
                [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
            )
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3)))


class TinyGPT(nn.Module):
    """A transformer whose output layer shares the embedding's weight."""

    def __init__(self, vocabulary: int = 67, width: int = 48, length: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


MODELS = {
    "mlp": UnevenMLP,
    "conv": ConvNet,
    "gpt": TinyGPT,
    # Twenty of the tests' small buckets.
    "deep_mlp": lambda: UnevenMLP((7, *[101] * 9, 3)),
    # Several of DDP's 1 MB buckets, and tensors small enough to move between them.
    "wide_mlp": lambda: UnevenMLP((7, *[301] * 9, 3)),
    "wide_conv": lambda: ConvNet((90,) * 9),
    "wide_gpt": lambda: TinyGPT(width=196),
    "spectral": Spectral,
    **ODD_MODELS,
}


def build(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model of that name, the same on every rank."""
    torch.manual_seed(seed)
    return MODELS[name]().to(dtype)


def batch(
    name: str, step: int, rank: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Inputs and targets, different on every rank and in every step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    name = name.removeprefix("wide_")
    if name == "gpt":
        tokens = torch.randint(67, (2, 17), generator=generator)
        return tokens[:, :-1], tokens[:, 1:].reshape(-1)
    if name in ("conv", "channels_last"):
        images = torch.randn(6, 1, 8, 8, generator=generator).to(dtype)
        return images, torch.randint(10, (6,), generator=generator)
    vectors = torch.randn(5, 7, generator=generator).to(dtype)
    return vectors, torch.randint(3, (5,), generator=generator)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy over all positions."""
    return F.cross_entropy(model(inputs).flatten(0, -2), targets)


def two_groups(model: nn.Module, weight_decay: float = 0.05) -> list[dict[str, object]]:
    """Decay for matrices, none for vectors, other learning rates: two groups that interleave."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.03},
    ]


OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    "nesterov": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "maximize": lambda groups: torch.optim.SGD(groups, lr=0.01, maximize=True),
    "sgd_foreach": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, foreach=True),
    "sgd_fused": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, fused=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "adamw_foreach": lambda groups: torch.optim.AdamW(groups, lr=0.01, foreach=True),
    "adamw_fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05, lr_decay=0.01),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
    "radam": lambda groups: torch.optim.RAdam(groups, lr=0.01),
    "adamax": lambda groups: torch.optim.Adamax(groups, lr=0.01),
    "adadelta": lambda groups: torch.optim.Adadelta(groups, lr=1.0),
    "asgd": lambda groups: torch.optim.ASGD(groups, lr=0.01, t0=5),
    "rprop": lambda groups: torch.optim.Rprop(groups, lr=0.01),
}


def optimizer_for(name: str, model: nn.Module) -> Optimizer:
    """The optimizer of that name over two groups of the model's parameters."""
    return OPTIMIZERS[name](two_groups(model, 0.0 if name == "rprop" else 0.05))


def weights(model: nn.Module) -> list[Tensor]:
    """Copies of all parameters."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def distance(left: Iterable[Tensor], right: Iterable[Tensor]) -> float:
    """Norm of the difference divided by the norm of `right`."""
    pairs = list(zip(left, right, strict=True))
    difference = sum(float((_wide(a) - _wide(b)).abs().square().sum()) for a, b in pairs)
    return (difference / sum(float(_wide(b).abs().square().sum()) for _, b in pairs)) ** 0.5


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.cdouble if tensor.is_complex() else torch.double)
