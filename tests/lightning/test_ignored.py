"""What `_ddp_params_and_buffers_to_ignore` names stays each rank's own, as under DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.harness import distributed
from tests.fabric import running
from tests.fabric.running import new_fabric
from tests.lightning.fitting import STRATEGIES, fit
from tests.lightning.nets import Net, copies
from tests.training.models import batch, loss_of, optimizer_for


class _WithOwn(nn.Module):
    """Has a counter, and a frozen parameter of another length, on each rank."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("shared", torch.zeros(1))
        self.place = nn.Parameter(torch.full((dist.get_rank() + 1,), float(dist.get_rank())))
        self.place.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += dist.get_rank() + 1
            self.shared += dist.get_rank() + 1
        return self.net(x) * self.place.sum().exp()


class _OwnNet(Net):
    def __init__(self) -> None:
        super().__init__("mlp")
        self.net = _WithOwn(self.net)
        self._ddp_params_and_buffers_to_ignore = ["net.steps", "net.place"]

    def configure_optimizers(self) -> Any:
        return optimizer_for("adamw", self)


def _check_own(own: _WithOwn, num_steps: int) -> None:
    rank = dist.get_rank()
    assert own.steps.item() == num_steps * (rank + 1)
    assert own.place.tolist() == [rank] * (rank + 1)


@distributed(world_sizes=(1, 2))
def test_they_stay_in_a_fit_and_what_is_trained_is_as_under_ddp(world_size: int) -> None:
    ends = {}
    for name, strategy in STRATEGIES.items():
        module = _OwnNet()
        fit(strategy(), module)
        _check_own(module.net, module.trainer.global_step)
        ends[name] = copies(module)
        if name == "dear":
            assert module.net.shared.item() == module.trainer.global_step
    assert all(map(torch.equal, ends["dear"], ends["ddp"]))


@distributed(world_sizes=(2,))
def test_they_stay_under_fabric() -> None:
    fabric = new_fabric(running.dear())
    module = _WithOwn(Net("mlp").net)
    module._ddp_params_and_buffers_to_ignore = {"steps", "place"}
    model, optimizer = fabric.setup(module, optimizer_for("sgd", module))
    for step in range(3):
        optimizer.zero_grad()
        fabric.backward(loss_of(model, *batch("mlp", step, fabric.global_rank)))
        optimizer.step()
    _check_own(module, 3)
    assert module.shared.item() == 3
    module.place.requires_grad_(True)
    with pytest.raises(ValueError, match="'place' stands in _ddp_params_and_buffers_to_ignore"):
        model(torch.randn(2, 7))
