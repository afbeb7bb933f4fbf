"""`local_steps=` with `weights="samples"`: ranks count by their samples of a round."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision, environments
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset, IterableDataset
from typing_extensions import override

from lightning_dear.planning import FixedPlan
from tests.distributed.harness import distributed
from tests.lightning.fitting import SHORT, dear, new_trainer
from tests.lightning.test_local_steps import (
    FRAGMENTS,
    NESTEROV,
    Module,
    assert_same,
    new_net,
    same_on_all_ranks,
    steps,
    weights,
)
from tests.local_steps.reference import Law, Reference

NUM_BATCHES = (8, 5, 3)
"""Of an epoch, by rank."""


def size_of(rank: int, index: int) -> int:
    return 1 + (5 * index + 2 * rank) % 6


def batch_of(rank: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + index)
    return torch.randn(size_of(rank, index), 9, generator=generator)


class Uneven(Dataset[Tensor]):
    """This rank's batches, of other sizes and numbers than those of other ranks."""

    def __len__(self) -> int:
        return NUM_BATCHES[dist.get_rank()]

    def __getitem__(self, index: int) -> Tensor:
        return batch_of(dist.get_rank(), index)


class Equal(Uneven):
    """As many batches on each rank: a resumed loader begins its epoch anew."""

    @override
    def __len__(self) -> int:
        return NUM_BATCHES[0]


class Endless(IterableDataset[Tensor]):
    """Without a length, on rank 1 alone."""

    def __iter__(self) -> Any:
        return (batch_of(1, index) for index in range(5))


def fit(strategy: Any, module: Module, *callbacks: Any, **options: Any) -> Any:
    path, data = options.pop("ckpt_path", None), options.pop("data", None) or Uneven()
    how = {"use_distributed_sampler": False, "max_epochs": 2, **options}
    trainer = new_trainer(strategy, *callbacks, **how)
    trainer.fit(module, DataLoader(data, batch_size=None), ckpt_path=path)
    return trainer


def weighed(**options: Any) -> Any:
    return dear(local_steps=steps(**options), weights="samples")


def index_of(rank: int, number: int) -> int | None:
    """The batch of a rank in a step. None means a repeat."""
    index = (number - 1) % NUM_BATCHES[0]
    return index if index < NUM_BATCHES[rank] else None


def samples(rank: int, number: int) -> float:
    index = index_of(rank, number)
    return 0.0 if index is None else float(size_of(rank, index))


def step(model: nn.Module, inner: Any, rank: int, number: int) -> None:
    if (index := index_of(rank, number)) is not None:
        model(batch_of(rank, index)).square().mean().backward()
        inner.step()
        inner.zero_grad()


def reference_of(num_steps: int, delay: int) -> Reference:
    names = [[name.removeprefix("net.") for name in owners] for owners in FRAGMENTS]
    law = Law(4, names, delay, 0.5, NESTEROV, samples)
    made = Reference(new_net(), partial(AdamW, lr=0.01), dist.get_world_size(), law)
    made.run(num_steps, step)
    return made


@pytest.mark.parametrize("delay", [0, 1, 3])
@distributed(world_sizes=(2, 3))
def test_loaders_of_other_lengths(delay: int) -> None:
    """A rank whose loader has ended makes no step of its own, and counts for what it has made."""
    module = Module()
    trainer = fit(weighed(delay=delay), module)
    assert trainer.global_step == 16
    reference = reference_of(16, delay)
    reference.flush()
    assert_same(weights(module), reference.anchor)


class ByStep(Module):
    """Its batches are those of the step, also in a resumed fit."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        batch = batch_of(dist.get_rank(), self.trainer.global_step)
        self.trainer.strategy.weigh(len(batch))
        return super().training_step(batch, batch_idx)


@distributed(world_sizes=(2, 3))
def test_a_folder_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Also within a round: samples from before the folder count."""
    module = ByStep()
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    how = {"local_steps": steps(), "weights": "samples", "save_distributed_checkpoint": True}
    fit(dear(**how), module, saver, enable_checkpointing=True, data=Equal())
    dist.barrier()
    for number in (2, 7, 10):
        again = ByStep()
        path = str(tmp_path / f"step={number}.ckpt")
        fit(dear(**how), again, data=Equal(), ckpt_path=path)
        for name, value in weights(module).items():
            assert torch.equal(weights(again)[name], value), (number, name)


class Accumulated(Module):
    """Its loss weighs tokens, which the user counts."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.trainer.strategy.weigh(10 * len(batch))
        return super().training_step(batch, batch_idx)


@distributed(world_sizes=(2, 3))
def test_accumulated_tokens() -> None:
    ours, theirs = Accumulated(), Module()
    fit(weighed(), ours, accumulate_grad_batches=2)
    fit(weighed(), theirs, accumulate_grad_batches=2)
    for name, value in weights(theirs).items():
        assert torch.allclose(weights(ours)[name], value, atol=1e-6), name
    assert same_on_all_ranks(weights(ours))


@distributed(world_sizes=(2,))
def test_a_scaler_where_a_rank_only_repeats() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    plugins = [environments.TorchElasticEnvironment(), MixedPrecision("16-mixed", "cpu", scaler)]
    module = Module()
    fit(weighed(), module, plugins=plugins)
    assert same_on_all_ranks(weights(module))
    assert all(bool(one.isfinite().all()) for one in weights(module).values())


class Sized(Module):
    """Notes the sizes of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.sizes.append(len(batch))
        return super().training_step(batch, batch_idx)


class Same(Dataset[Tensor]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(9, generator=torch.Generator().manual_seed(index))


@distributed(world_sizes=(2,))
def test_batches_are_split_by_shares() -> None:
    module = Sized()
    trainer = new_trainer(dear(local_steps=steps(), split=[3, 1]))
    trainer.fit(module, DataLoader(Same(), batch_size=4))
    assert module.sizes == [6 - 4 * dist.get_rank()] * 6
    assert same_on_all_ranks(weights(module))
    totals: list[Any] = [None, None]
    dist.all_gather_object(totals, trainer.strategy.pipeline_of().training.weights.total)
    assert totals == [36.0, 12.0]


def raised(call: Any) -> str:
    with pytest.raises(ValueError, match="local_steps") as error:
        call()
    return str(error.value)


@distributed(world_sizes=(2, 3))
def test_a_loader_without_a_length_is_refused_on_all_ranks() -> None:
    data = Endless() if dist.get_rank() == 1 else Uneven()
    said = raised(lambda: fit(weighed(), Module(), data=data))
    assert "The training loader of rank 1 has no length. With local_steps" in said


@distributed(world_sizes=(1,))
def test_one_rank_needs_no_length() -> None:
    assert fit(weighed(), Module(), data=Endless()).global_step == 10


@pytest.mark.parametrize("rank", [0, 1])
@distributed(world_sizes=(2,))
def test_a_weight_that_is_no_number_is_named(rank: int) -> None:
    class Bad(Module):
        @override
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            is_bad = dist.get_rank() == rank and batch_idx == 2
            self.trainer.strategy.weigh(-1 if is_bad else len(batch))
            return super().training_step(batch, batch_idx)

    said: Sequence[Any] = [None, None]
    try:
        fit(dear(local_steps=steps(), weights="samples", timeout=SHORT), Bad())
        own = "nothing"
    except Exception as error:
        own = str(error)
    if dist.get_rank() == rank:
        assert "This rank's weight of a batch" in own
        assert "-1" in own
    else:
        assert own != "nothing", said


def test_a_plan_of_the_whole_model_is_refused() -> None:
    said = raised(lambda: dear(local_steps=8, fusion=FixedPlan("plan.json")))
    assert "it plans steps in which gradients travel. Use fusion='threshold'" in said


def test_measured_shares_are_refused() -> None:
    said = raised(lambda: dear(local_steps=8, split="auto"))
    assert "local_steps does not work with split='auto'" in said
    assert "split=[3, 1]" in said
