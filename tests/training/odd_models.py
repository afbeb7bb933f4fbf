"""Models that read their parameters in ways that break naive overlap: vectors of 7 in, 3 out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class RegisteredBackwards(nn.Module):
    """Executes its layers in the reverse of the order in which it registers them."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(90, 3)
        self.middle = nn.Linear(130, 90)
        self.first = nn.Linear(7, 130)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class Functional(nn.Module):
    """Never calls its layers, and owns parameters itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 130)
        self.second = nn.Linear(130, 3)
        self.scale = nn.Parameter(torch.ones(130))

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.first.weight, self.first.bias) * self.scale
        return F.linear(torch.tanh(x), self.second.weight, self.second.bias)


class TiedAliasFirst(nn.Module):
    """Reads a shared weight through the module that was registered last."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7, bias=False)
        self.wide = nn.Linear(7, 300)
        self.head = nn.Linear(300, 3)
        self.alias = nn.Linear(7, 7, bias=False)
        self.alias.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.wide(self.inner(torch.tanh(self.alias(x))))))


class HeldList(nn.Module):
    """Reads weights through a list that no gate can see."""

    def __init__(self) -> None:
        super().__init__()
        self.part = _HoldsWeights()
        self.head = nn.Linear(130, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.part(x))


class _HoldsWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 130)
        self.held = [self.inner.weight, self.inner.bias]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, *self.held))


class Recurrent(nn.Module):
    """A GRU keeps its flat weights in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(7, 40, batch_first=True)
        self.head = nn.Linear(40, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x.unsqueeze(1))[0][:, -1])


class Attention(nn.Module):
    """`MultiheadAttention` never calls its own output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(7, 32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).unsqueeze(1)
        return self.head(self.attention(x, x, x, need_weights=False)[0][:, 0])


class CalledTwice(nn.Module):
    """Calls one layer twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 130)
        self.again = nn.Linear(130, 130)
        self.head = nn.Linear(130, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.again(torch.tanh(self.again(self.first(x))))))


class Checkpointed(nn.Module):
    """Recomputes its middle in backward, both ways."""

    use_reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 130)
        self.middle = nn.Sequential(nn.Linear(130, 130), nn.Tanh(), nn.Linear(130, 130))
        self.head = nn.Linear(130, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.middle, self.first(x), use_reentrant=self.use_reentrant)
        x = checkpoint(self.middle, x, use_reentrant=self.use_reentrant)
        return self.head(x)


class ReentrantCheckpointed(Checkpointed):
    """The reentrant kind runs a backward of its own for each part: two gradients per weight."""

    use_reentrant = True


class ChannelsLast(nn.Module):
    """Convolutions whose weights lie channels last in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 12, 3)
        self.second = nn.Conv2d(12, 30, 3)
        self.head = nn.Linear(30, 10)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.second(F.relu(self.first(x.to(memory_format=torch.channels_last)))))
        return self.head(x.mean((2, 3)))


class Spectral(nn.Module):
    """Has a complex weight, as Fourier neural operators have."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(7, width)
        self.phases = nn.Parameter(torch.randn(width // 2 + 1, dtype=torch.cfloat))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(torch.tanh(self.first(x))) * self.phases
        return self.head(torch.fft.irfft(waves, n=self.first.out_features))

    def to(self, *_: Any, **__: Any) -> Spectral:
        """Stays as it is: torch would make complex weights real."""
        return self


ODD_MODELS = {
    "attention": Attention,
    "called_twice": CalledTwice,
    "channels_last": ChannelsLast,
    "checkpointed": Checkpointed,
    "functional": Functional,
    "held_list": HeldList,
    "recurrent": Recurrent,
    "reentrant": ReentrantCheckpointed,
    "registered_backwards": RegisteredBackwards,
    "tied_alias_first": TiedAliasFirst,
}
