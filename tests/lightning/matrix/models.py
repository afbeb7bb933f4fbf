"""Models that read their weights in ways that a naive overlap gets wrong: 7 numbers in, 3 out."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 90


class Frozen(nn.Module):
    """The first layer does not train, nor does one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, WIDTH).requires_grad_(False)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 3)
        self.second.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


class FunctionalCall(nn.Module):
    """Runs its layers through `torch.func.functional_call` with a dict made before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))

    def forward(self, x: Tensor) -> Tensor:
        parameters = dict(self.layers.named_parameters())
        return torch.func.functional_call(self.layers, parameters, (x,))


class InTorchScript(nn.Module):
    """Parts that are scripted, traced, loaded, and of the older kind, between two that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, WIDTH)
        self.scripted = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        self.traced = torch.jit.trace(nn.Linear(WIDTH, WIDTH), torch.zeros(2, WIDTH))
        file = io.BytesIO()
        torch.jit.save(self.scripted, file)
        file.seek(0)
        self.loaded = torch.jit.load(file)
        self.older = _ScriptedScale()
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        # Optimized, its bits depend on how often parts of this kind have run in the process.
        with torch.jit.optimized_execution(False):
            x = self.loaded(self.traced(self.scripted(torch.tanh(self.first(x)))))
            return self.last(self.older(x))


class _ScriptedScale(torch.jit.ScriptModule):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    @torch.jit.script_method
    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Parametrized(nn.Module):
    """Weights that are computed from others at each read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(7, WIDTH))
        self.middle = nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class HoldsAnothers(nn.Module):
    """Takes over the very parameters of a linear layer, as fusing and quantizing tools do."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class NoGradTeacher(nn.Module):
    """Its own weights teach, without gradient, before the owner runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.layers(x.flip(-1)) + self.layers[2].weight.sum()
        return self.layers(x) + 0.1 * target


class MovingTeacher(nn.Module):
    """A frozen copy follows the weights at the start of every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(7, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
        self.teacher = nn.Sequential(nn.Linear(7, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
        self.teacher.requires_grad_(False)

    @torch.no_grad()
    def _follow(self) -> None:
        for theirs, ours in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            theirs.lerp_(ours, 0.25)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self._follow()
        return self.student(x) + 0.1 * self.teacher(x)


class ThroughData(nn.Module):
    """Reads `.data` and a detached view of weights before their owner runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, WIDTH)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.last.weight.data.abs().mean() + self.last.bias.detach()[0]
        return self.last(torch.tanh(self.first(x) * (1 + scale)))


class HeldAlias(nn.Module):
    """Reads the last layer's weight through a list, before the layer runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, WIDTH)
        self.last = nn.Linear(WIDTH, 3)
        self.held = [self.last.weight, self.last.bias]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x) + self.held[0].sum(0) * self.held[1][0]))


class Reentrant(nn.Module):
    """Its middle runs again in backward, within a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, WIDTH)
        self.middle = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.middle, self.first(x), use_reentrant=True))


class FirstLayerAgain(nn.Module):
    """The last layer is the first one's weight, turned round."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, WIDTH, bias=False)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.zeros(7))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.middle(torch.tanh(self.first(x))))
        return F.linear(hidden, self.first.weight.t(), self.bias)[..., :3]


class BiasFirst(nn.Module):
    """Adds the last layer's bias to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, WIDTH)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.pad(self.last.bias, (0, 4))
        return self.last(torch.tanh(self.first(x)))


class Embedded(nn.Module):
    """Reads an embedding through `F.embedding`, and part of it by index."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, WIDTH)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        numbers = (x.abs() * 5).long().clamp_max(19)
        hidden = F.embedding(numbers, self.table.weight).mean(-2) + self.table.weight[0]
        return self.last(torch.tanh(hidden))


class TwiceInSomeSteps(nn.Module):
    """Runs a layer once or twice, and skips another, depending on the step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, WIDTH)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 3)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_calls += 1
        x = torch.tanh(self.again(torch.tanh(self.first(x))))
        if self.num_calls % 2 == 0:
            x = torch.tanh(self.again(x))
        if self.num_calls % 3:
            x = torch.tanh(self.sometimes(x))
        return self.last(x)


class Branches(nn.Module):
    """Three branches, of which a forward uses those that `use` names, and one that none uses.

    Args:
        use: (step, rank) -> numbers of the branches.
    """

    def __init__(self, use: Any) -> None:
        super().__init__()
        self.use = use
        self.branches = nn.ModuleList(nn.Linear(7, 50) for _ in range(3))
        self.head = nn.Linear(50, 3)
        self.never = nn.Linear(70, 70)
        self.step, self.rank = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = sum(self.branches[number](x) for number in self.use(self.step, self.rank))
        return self.head(hidden)


class Normed(nn.Module):
    """BatchNorm between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x).flatten(0, -2)).unflatten(0, x.shape[:-1])
        return self.last(torch.tanh(hidden))
