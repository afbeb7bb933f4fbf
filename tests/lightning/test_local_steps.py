"""`local_steps=` under a Trainer: the reference's bits, the anchor where users look, resuming."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, Dataset

from lightning_dear.collectives.work import reusable_groups
from lightning_dear.local_steps import LocalSteps
from tests.distributed.harness import distributed
from tests.lightning.fitting import ddp, dear, new_trainer
from tests.local_steps.reference import Law, Reference

NESTEROV = partial(SGD, lr=1.0, momentum=0.5, nesterov=True)
FRAGMENTS = [["net.0", "net.1"], ["net.2", "net.3"]]


class Batches(Dataset[Tensor]):
    """Batch n of this rank; the same whenever it is read."""

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: int) -> Tensor:
        return batch_of(dist.get_rank(), index)


def batch_of(rank: int, index: int) -> Tensor:
    return torch.randn(6, 9, generator=torch.Generator().manual_seed(100 * rank + index))


def new_net(*, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Linear(9, 9) for _ in range(4)]
    return nn.Sequential(*layers, nn.BatchNorm1d(9)) if norm else nn.Sequential(*layers)


class Module(LightningModule):
    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        self.net = new_net(norm=norm)
        self.seen: list[dict[str, Tensor]] = []
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Tensor, _: int) -> None:
        self.losses.append(self.net(batch).square().mean())

    def on_validation_start(self) -> None:
        self.seen.append(weights(self))

    def configure_optimizers(self) -> Any:
        return AdamW(self.net.parameters(), lr=0.01)


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in module.state_dict().items()}


def loader(num_batches: int) -> DataLoader[Tensor]:
    return DataLoader(Batches(num_batches), batch_size=None)


def fit(
    strategy: Any, module: Module, num_batches: int, *callbacks: Callback, **options: Any
) -> Any:
    path = options.pop("ckpt_path", None)
    trainer = new_trainer(strategy, *callbacks, use_distributed_sampler=False, **options)
    trainer.fit(module, loader(num_batches), loader(2), ckpt_path=path)
    return trainer


def steps(**options: Any) -> LocalSteps:
    defaults = {"every": 4, "fragments": FRAGMENTS, "delay": 1, "mix": 0.5, "outer": NESTEROV}
    return LocalSteps(**{**defaults, **options})


def reference_of(num_steps: int, **options: Any) -> Reference:
    """The reference after some steps. With `fragments`, each layer is one."""
    how = steps(**options)
    names = [[name.removeprefix("net.") for name in owners] for owners in FRAGMENTS]
    if "fragments" in options:
        names = [[str(number)] for number in range(options["fragments"])]
    law = Law(how.every, names, how.delay or 0, how.mix or 0.0, NESTEROV)
    made = Reference(new_net(), partial(AdamW, lr=0.01), dist.get_world_size(), law)

    def step(model: nn.Module, inner: Any, rank: int, number: int) -> None:
        model(batch_of(rank, number - 1)).square().mean().backward()
        inner.step()
        inner.zero_grad()

    made.run(num_steps, step)
    return made


def assert_same(own: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for name, value in theirs.items():
        assert torch.equal(own[f"net.{name}"], value), name


def same_on_all_ranks(own: Any) -> bool:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, own)
    return all(torch.equal(one[name], values[0][name]) for one in values for name in values[0])


@pytest.mark.parametrize("options", [{}, {"delay": 0, "mix": 0.0}, {"delay": 3}], ids=str)
@distributed(world_sizes=(2, 3))
def test_a_fit_has_the_bits_of_the_reference(options: dict[str, Any]) -> None:
    module = Module()
    fit(dear(local_steps=steps(**options)), module, 11)
    reference = reference_of(11, **options)
    reference.flush()
    assert_same(weights(module), reference.anchor)


@distributed(world_sizes=(2, 3))
def test_validation_and_files_have_the_anchor(tmp_path: Path) -> None:
    module = Module()
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1)
    strategy = dear(local_steps=steps())
    how = {"val_check_interval": 3, "enable_checkpointing": True, "check_val_every_n_epoch": None}
    fit(strategy, module, 11, saver, **how)
    for seen, number in zip(module.seen, (3, 6, 9), strict=True):
        assert_same(seen, reference_of(number).anchor)
    dist.barrier()
    for number in (5, 10):
        file = torch.load(next(tmp_path.glob(f"*step={number}.ckpt")), weights_only=False)
        assert_same(file["state_dict"], reference_of(number).anchor)
    reference = reference_of(11)
    reference.flush()
    assert_same(weights(module), reference.anchor)


@distributed(world_sizes=(2,))
def test_validation_in_a_fit_is_that_of_ddp_on_the_saved_weights(tmp_path: Path) -> None:
    module = Module(norm=True)
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=6, save_top_k=-1)
    how = {"val_check_interval": 6, "enable_checkpointing": True, "check_val_every_n_epoch": None}
    fit(dear(local_steps=LocalSteps(every=4)), module, 6, saver, **how)
    dist.barrier()
    other = Module(norm=True)
    path = next(tmp_path.glob("*.ckpt"))
    trainer = new_trainer(ddp(), use_distributed_sampler=False)
    trainer.validate(other, loader(2), ckpt_path=str(path), verbose=False)
    assert all(map(torch.equal, module.losses, other.losses))
    assert same_on_all_ranks(weights(module))


@pytest.mark.parametrize("how", ["epochs", "steps"])
@distributed(world_sizes=(2, 3))
def test_the_last_checkpoint_has_the_weights_of_the_end(tmp_path: Path, how: str) -> None:
    """So have the last validation, and a checkpoint that is saved after the last step."""
    module = Module()
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=7, save_top_k=-1)
    limits = {"max_epochs": 1} if how == "epochs" else {"max_epochs": -1, "max_steps": 7}
    options: Any = {"val_check_interval": 7, "check_val_every_n_epoch": None, **limits}
    fit(dear(local_steps=steps()), module, 7, saver, enable_checkpointing=True, **options)
    dist.barrier()
    reference = reference_of(7)
    reference.flush()
    assert_same(weights(module), reference.anchor)
    assert_same(module.seen[-1], reference.anchor)
    saved = torch.load(tmp_path / "step=7.ckpt", weights_only=False)
    assert_same(saved["state_dict"], reference.anchor)


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_train_end"])
@distributed(world_sizes=(2,))
def test_what_is_written_behind_the_last_exchange_stays(hook: str) -> None:
    """As under DDP."""

    class Writes(Module):
        pass

    def write(module: Module) -> None:
        with torch.no_grad():
            module.net[0].weight.fill_(0.25)

    setattr(Writes, hook, write)
    module = Writes()
    fit(dear(local_steps=steps()), module, 7)
    assert torch.equal(module.net[0].weight, torch.full((9, 9), 0.25))


@distributed(world_sizes=(2,))
def test_writing_into_the_anchor_raises() -> None:
    class Writes(Module):
        def on_validation_end(self) -> None:
            with torch.no_grad():
                self.net[0].weight.fill_(0.25)

    how: Any = {"val_check_interval": 3, "check_val_every_n_epoch": None}
    with pytest.raises(RuntimeError, match="while the module had the anchor"):
        fit(dear(local_steps=steps()), Writes(), 7, **how)


class Masked(Module):
    """Has a mask that never changes, and a buffer that only rank 1 spoils."""

    def __init__(self, *, masked: bool, spoils: bool = False) -> None:
        super().__init__()
        self.spoils = spoils
        if masked:
            self.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))
            self.register_buffer("running", torch.zeros(3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.spoils:
            self.running[2] += 1 + self.global_rank
        if self.spoils and self.global_rank == 1:
            self.running[:2] = float("nan")
        elif hasattr(self, "running") and not self.spoils:
            self.running.add_(self.global_rank)
        return super().training_step(batch, batch_idx)


@distributed(world_sizes=(2,))
def test_a_mask_with_inf_changes_nothing() -> None:
    ends = []
    for masked in (False, True):
        module = Masked(masked=masked)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Buffers of rank")
            fit(dear(local_steps=steps()), module, 11)
        ends.append([one.detach().clone() for one in module.net.parameters()])
    assert all(map(torch.equal, *ends))
    assert torch.equal(module.mask, torch.full((3, 3), float("-inf")).triu(1))
    assert torch.equal(module.running, torch.full((3,), 5.5))


@distributed(world_sizes=(2,))
def test_buffers_that_are_not_finite_do_not_stop_replicas() -> None:
    ends = []
    for spoils in (False, True):
        module = Masked(masked=True, spoils=spoils)
        fit(dear(local_steps=steps()), module, 11)
        ends.append([one.detach().clone() for one in module.net.parameters()])
    assert all(map(torch.equal, *ends))
    # The mean of 1 and 2 in each of 11 steps.
    assert torch.equal(module.running, torch.tensor([0, 0, 16.5]))


@distributed(world_sizes=(2,))
def test_a_file_goes_on_with_the_outer_state(tmp_path: Path) -> None:
    module = Module()
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=8, save_top_k=-1)
    fit(dear(local_steps=steps()), module, 8, saver, enable_checkpointing=True)
    dist.barrier()
    path = str(next(tmp_path.glob("*.ckpt")))
    saved = torch.load(path, weights_only=False)["lightning_dear"]["outer_optimizer"]
    assert saved.pop("optimizer_class") == "SGD"
    assert set(saved) == {name for name, _ in module.named_parameters()}
    again, before = Module(), {}

    class Look(Callback):
        def on_train_start(self, trainer: Trainer, _: Any) -> None:
            strategy: Any = trainer.strategy
            for fragment in strategy._outer.fragments:
                before.update(fragment.state())

    fit(dear(local_steps=steps()), again, 8, Look(), ckpt_path=path, max_epochs=2)
    if dist.get_rank() == 0:
        for name, own in saved.items():
            assert torch.equal(before[name]["momentum_buffer"], own["momentum_buffer"])


@distributed(world_sizes=(2,))
def test_a_rank_with_nan_takes_the_anchor_and_others_go_on() -> None:
    class Spoils(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
            if trainer.global_step == 6 and dist.get_rank() == 1:
                with torch.no_grad():
                    module.net[1].weight.fill_(float("nan"))
            # Its fragment, the first, is sent after step 9.
            if trainer.global_step >= 9:
                assert all(bool(one.isfinite().all()) for one in module.parameters())

    module = Module()
    fit(dear(local_steps=steps()), module, 16, Spoils())
    assert same_on_all_ranks(weights(module))
    assert all(bool(one.isfinite().all()) for one in weights(module).values())


@distributed(world_sizes=(1, 2, 3))
def test_every_step_is_ddp() -> None:
    class Plain(Module):
        def configure_optimizers(self) -> Any:
            return SGD(self.net.parameters(), lr=0.05)

    ours, theirs = Plain(), Plain()
    plain = LocalSteps(every=1, outer=partial(SGD, lr=1.0))
    fit(dear(local_steps=plain), ours, 100)
    fit(ddp(), theirs, 100)
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    assert max(float((left - right).abs().max()) for left, right in pairs) < 1e-5


@distributed(world_sizes=(2,))
def test_a_second_fit_gets_other_groups() -> None:
    """Messages of the first may still be under way, such as after an error."""

    class Looks(Callback):
        def on_train_start(self, *_: Any) -> None:
            assert not reusable_groups

    for _ in range(2):
        module = Module()
        fit(dear(local_steps=steps()), module, 5, Looks())
        assert same_on_all_ranks(weights(module))


@distributed(world_sizes=(2,))
def test_an_optimizer_may_come_to_have_fewer_modules_than_fragments() -> None:
    class Shrinks(Module):
        def on_train_batch_start(self, batch: Any, index: int) -> None:
            if index == 5:
                self.trainer.optimizers[0].param_groups.pop()

        def configure_optimizers(self) -> Any:
            groups = [{"params": self.net[:2].parameters()}, {"params": self.net[2:].parameters()}]
            return AdamW(groups, lr=0.01)

    module = Shrinks()
    fit(dear(local_steps=LocalSteps(every=4)), module, 13)
    assert same_on_all_ranks(weights(module))


@distributed(world_sizes=(2,))
def test_a_fit_without_a_local_step_is_told() -> None:
    for dense_steps, warned in ((3, 0), (4, 1)):
        how = dear(local_steps=LocalSteps(every=1, dense_steps=dense_steps))
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            fit(how, Module(), 4, max_steps=4)
        said = [one for one in found if "none is local" in str(one.message)]
        assert len(said) == (warned if dist.get_rank() == 0 else 0)
