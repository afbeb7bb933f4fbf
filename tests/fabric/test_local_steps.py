"""`local_steps=` under Fabric: the reference's bits, and the anchor in evaluation and files."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from lightning_dear.fabric.module import finish_at_exit
from lightning_dear.local_steps import LocalSteps
from tests.distributed.harness import distributed
from tests.fabric.running import dear, new_fabric
from tests.lightning.fitting import assert_ranks_agree
from tests.lightning.test_local_steps import batch_of, new_net, reference_of, steps


class Training:
    """A model that `fabric.setup` returned."""

    def __init__(self, local_steps: Any = None, *, differs: bool = False, **options: Any) -> None:
        how = local_steps or steps(fragments=None, **options)
        self.fabric = new_fabric(dear(local_steps=how))
        self.strategy: Any = self.fabric.strategy
        self.raw = new_net()
        for parameter in self.raw.parameters() if differs and dist.get_rank() else ():
            nn.init.ones_(parameter)
        optimizer = AdamW(self.raw.parameters(), lr=0.01)
        self.model, self.optimizer = self.fabric.setup(self.raw, optimizer)

    def run(self, numbers: range) -> None:
        self.model.train()
        for number in numbers:
            loss = self.model(batch_of(dist.get_rank(), number)).square().mean()
            self.fabric.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def evaluate(self) -> Tensor:
        self.model.eval()
        with torch.no_grad():
            found: Tensor = self.model(batch_of(0, 77))
        return found

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: one.detach().clone() for name, one in self.raw.named_parameters()}


def output_of(weights: dict[str, Tensor]) -> Tensor:
    net = new_net()
    net.load_state_dict(weights)
    with torch.no_grad():
        found: Tensor = net(batch_of(0, 77))
    return found


@distributed(world_sizes=(2, 3))
def test_evaluation_and_the_end_have_the_anchor() -> None:
    """Also if only rank 0 has loaded weights: all ranks begin with them."""
    training = Training(differs=True)
    training.run(range(6))
    with torch.no_grad():
        outputs = [training.model(batch_of(0, 77))]
    assert torch.equal(training.evaluate(), output_of(reference_of(6, fragments=4).anchor))
    assert not torch.equal(outputs[0], training.evaluate())
    training.run(range(6, 11))
    training.strategy.finish_local_steps()
    reference = reference_of(11, fragments=4)
    reference.flush()
    for name, value in reference.anchor.items():
        assert torch.equal(training.weights[name], value)


@distributed(world_sizes=(2,))
def test_a_file_has_the_anchor_and_the_outer_state(tmp_path: Path) -> None:
    training = Training()
    training.run(range(8))
    state = {"model": training.model, "optimizer": training.optimizer}
    path = training.fabric.broadcast(tmp_path) / "file.ckpt"
    training.fabric.save(path, state)
    training.fabric.barrier()
    anchor = reference_of(8, fragments=4).anchor
    saved = torch.load(path, weights_only=False)
    for name, value in anchor.items():
        assert torch.equal(saved["model"][name], value)
    other = Training()
    other.fabric.load(path, {"model": other.model, "optimizer": other.optimizer})
    for fragment in other.strategy._trained[0].outer.fragments:
        for name, own in fragment.state().items():
            theirs = saved["lightning_dear"]["outer_optimizermodel"][name]
            assert dist.get_rank() or torch.equal(own["momentum_buffer"], theirs["momentum_buffer"])
    other.run(range(3))
    other.strategy.finish_local_steps()


@distributed(world_sizes=(2,))
def test_finishing_twice_changes_nothing() -> None:
    """Not even the momentum of the outer optimizer moves the anchor."""
    training = Training()
    training.run(range(7))
    training.strategy.finish_local_steps()
    before = training.weights
    training.strategy.finish_local_steps()
    for name, value in training.weights.items():
        assert torch.equal(before[name], value)


@distributed(world_sizes=(2,))
def test_training_mode_without_gradients_has_the_replica() -> None:
    training = Training()
    training.run(range(6))
    with torch.no_grad():
        before = training.model(batch_of(0, 77))
        training.evaluate()
        training.model.train()
        assert torch.equal(training.model(batch_of(0, 77)), before)


@distributed(world_sizes=(2,))
def test_writing_after_an_evaluation_raises() -> None:
    training = Training()
    training.run(range(6))
    training.evaluate()
    with torch.no_grad():
        training.raw[0].weight.clamp_(-0.1, 0.1)
    with pytest.raises(RuntimeError, match="while the module had the anchor"):
        training.run(range(6, 7))


@distributed(world_sizes=(2,))
def test_an_exit_without_an_exchange_warns() -> None:
    training = Training()
    training.run(range(6))
    with pytest.warns(UserWarning, match="finish_local_steps"):
        finish_at_exit()
    training.strategy.finish_local_steps()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        finish_at_exit()


@distributed(world_sizes=(2,))
def test_an_end_without_an_exchange_warns() -> None:
    training = Training()
    training.run(range(6))
    with pytest.warns(UserWarning, match="finish_local_steps"):
        training.strategy._trained[0].end()
    for name, value in reference_of(6, fragments=4).anchor.items():
        assert torch.equal(training.weights[name], value)
    assert isinstance(training.raw, nn.Sequential)


@distributed(world_sizes=(2,))
def test_dense_steps_come_first() -> None:
    training = Training(dense_steps=4)
    training.run(range(4))
    assert_ranks_agree([[*training.weights.values()]])
    training.run(range(4, 11))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, training.weights["0.weight"])
    assert not torch.equal(everyone[0], everyone[1])
    training.strategy.finish_local_steps()
    assert_ranks_agree([[*training.weights.values()]])


@pytest.mark.parametrize(
    ("local_steps", "then"),
    [(None, None), (None, "auto"), pytest.param("auto", "auto", marks=pytest.mark.slow)],
)
@distributed(world_sizes=(2,))
def test_a_file_of_local_steps_goes_on_without_dense_steps(
    local_steps: str | None, then: str | None, tmp_path: Path
) -> None:
    found = LocalSteps(every=4, fragments=2, delay=1)
    with mock.patch("lightning_dear.strategy.local.hiding", return_value=found):
        training = Training(local_steps, dense_steps=4)
        training.run(range(16))
    path = training.fabric.broadcast(tmp_path) / "file.ckpt"
    training.fabric.save(path, {"model": training.model, "optimizer": training.optimizer})
    training.fabric.barrier()
    saved = torch.load(path, weights_only=False)
    other = Training(then, dense_steps=4)
    other.fabric.load(path, {"model": other.model, "optimizer": other.optimizer})
    (module,) = other.strategy._trained
    assert module.outer.is_on
    states = {name: own for one in module.outer.fragments for name, own in one.state().items()}
    theirs = saved["lightning_dear"]["outer_optimizermodel"]
    assert states.keys() == theirs.keys() - {"optimizer_class"}
    for name, own in states.items() if dist.get_rank() == 0 and local_steps is None else ():
        assert torch.equal(own["momentum_buffer"], theirs[name]["momentum_buffer"])
    for name, value in other.weights.items():
        assert torch.equal(value, saved["model"][name])
    other.run(range(16, 19))
    other.strategy.finish_local_steps()
    assert_ranks_agree([[*other.weights.values()]])
