"""Training loaders of which ranks have unequal numbers of batches: all ranks end together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MeanMetric
from typing_extensions import override

from tests.distributed.harness import distributed, run_ranks
from tests.lightning.fitting import dear, new_trainer

SIZES = (4, 6, 3)
"""Batch size of each rank."""

NUMBERS = (8, 5, 1)
"""Number of batches of each rank."""

WIDTH = 5


def samples(rank: int, number: int) -> tuple[Tensor, Tensor]:
    """The inputs and targets of a rank that has `number` batches."""
    generator = torch.Generator().manual_seed(1 + rank)
    options = {"generator": generator, "dtype": torch.float64}
    shape = number * SIZES[rank]
    return torch.randn(shape, WIDTH, **options), torch.randn(shape, 1, **options)  # type: ignore[call-overload]


class Samples(IterableDataset[Any]):
    """Samples of a rank, without a length. Several workers share them batch by batch."""

    def __init__(self, rank: int, number: int) -> None:
        self.rank, self.number = rank, number

    def __iter__(self) -> Iterator[Any]:
        return zip(*samples(self.rank, self.number), strict=True)


class Positioned:
    """A loader that saves its position, without a length or with one.

    Attributes:
        fetched: How many batches it has given in all epochs.
    """

    def __init__(self, rank: int, number: int) -> None:
        self.batches = list(DataLoader(TensorDataset(*samples(rank, number)), SIZES[rank]))
        self.start = self.position = self.fetched = 0

    def __iter__(self) -> Iterator[Any]:
        self.position, self.start = self.start, 0
        return self._give()

    def _give(self) -> Iterator[Any]:
        while self.position < len(self.batches):
            self.position, self.fetched = self.position + 1, self.fetched + 1
            yield self.batches[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["position"]


class SizedPositioned(Positioned):
    def __len__(self) -> int:
        return len(self.batches)


def iterable(rank: int, number: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Samples(rank, number), SIZES[rank], **options)


def sized(rank: int, number: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*samples(rank, number)), SIZES[rank])


class Net(LightningModule):
    """A small net in fp64. Its forward waits for all ranks, as SyncBatchNorm does.

    Attributes:
        sizes: Of each batch: its number, whether it is the last one, and whether it is a repeat.
    """

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 1)).double()
        self.mean, self.optimizer = MeanMetric(), optimizer
        self.batches: list[tuple[int, bool, bool]] = []
        self.validated: list[int] = []
        self.means: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        there = torch.ones(1)
        dist.all_reduce(there)
        assert int(there) == self.trainer.world_size
        loops = self.trainer.fit_loop.epoch_loop
        is_repeat = self.trainer.strategy._loaders.is_repeat  # type: ignore[attr-defined]
        self.batches.append((batch_idx, loops.batch_progress.is_last_batch, is_repeat))
        loss = self.loss(batch)
        self.mean.update(loss.detach())
        self.log("metric", self.mean, on_step=True, on_epoch=True)
        self.log("loss", loss, on_epoch=True, on_step=True, sync_dist=True)
        self.log("given_epoch", loss, on_epoch=True, on_step=False, sync_dist=True, batch_size=len(batch[0]))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self.trainer.global_step)

    def on_train_epoch_end(self) -> None:
        means = [float(self.trainer.callback_metrics[name]) for name in ("loss_epoch", "given_epoch")]
        assert means[0] == means[1], means
        self.means.append(means[0])
        self.log("end", 1.0)

    def configure_optimizers(self) -> Any:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), 0.01)


def fit(loader: Any, *callbacks: Callback, net: Net | None = None, **options: Any) -> Net:
    """Fits with samples as weights, and checks that ranks have done the same."""
    net, path = net or Net(), options.pop("ckpt_path", None)
    validates = options.pop("validates", False)
    trainer = new_trainer(dear(weights="samples"), *callbacks, **{"max_epochs": 3, **options})
    trainer.fit(net, loader, sized(0, 1) if validates else None, ckpt_path=path)
    weights = [one.detach().clone() for one in net.parameters()]
    told = [(number, is_last) for number, is_last, _ in net.batches]
    logged = {name: float(one) for name, one in trainer.callback_metrics.items() if "metric" not in name}
    logged.pop("loss_step", None)
    facts = told, trainer.global_step, trainer.current_epoch, net.validated, net.means, logged
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (facts, [one.tolist() for one in weights]))
    for one in everyone:
        assert one == everyone[0], (one[0], everyone[0][0])
    return net


def reference(numbers: Sequence[int], optimizer: str = "adamw", epochs: int = 3, every: int = 1, limit: int | None = None) -> Net:
    """One process on the union: batch i is that of all ranks that have one."""
    net = Net(optimizer)
    step: torch.optim.Optimizer = net.configure_optimizers()
    own = []
    for rank, number in enumerate(numbers):
        x, y = samples(rank, number)
        own.append([*zip(x.split(SIZES[rank]), y.split(SIZES[rank]), strict=True)])
    rounds = [[one for one in batches if one is not None] for batches in zip_longest(*own)][:limit]
    for _ in range(epochs):
        total, count = 0.0, 0
        for first in range(0, len(rounds), every):
            window = [one for batches in rounds[first : first + every] for one in batches]
            step.zero_grad()
            num_steps = len(rounds[first : first + every])
            n = sum(len(x) for x, _ in window)
            for batch in window:
                loss = net.loss(batch)
                total, count = total + float(loss) * len(batch[0]), count + len(batch[0])
                (loss * len(batch[0]) / n * num_steps / every).backward()
            step.step()
        net.means.append(total / count)
    return net


WEIGHED = True


def assert_is_of_one_process(net: Net, other: Net, atol: float = 1e-12) -> None:
    assert len(net.means) == len(other.means)
    if WEIGHED:
        for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
            assert (ours - theirs).abs().max() <= atol, (ours - theirs).abs().max()
        assert net.means == pytest.approx(other.means, rel=1e-6)


def _trains(make: Callable[..., Any], own: dict[str, Any], options: dict[str, Any]) -> list[Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    numbers = NUMBERS[:size]
    net = fit(make(rank, numbers[rank], **own), **options)
    limit, every = options.get("limit_train_batches"), options.get("accumulate_grad_batches", 1)
    if "max_steps" not in options and rank == 0:
        assert_is_of_one_process(net, reference(numbers, every=every, limit=limit))
    return net.batches


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("make", "own", "options"),
    [
        (iterable, {}, {}),
        (sized, {}, {}),
        (iterable, {}, {"accumulate_grad_batches": 2}),
        (sized, {}, {"accumulate_grad_batches": 2}),
        (iterable, {}, {"accumulate_grad_batches": 3}),
        (sized, {}, {"accumulate_grad_batches": 3}),
        (iterable, {}, {"limit_train_batches": 6}),
        (sized, {}, {"limit_train_batches": 6}),
        (iterable, {}, {"max_steps": 11, "max_epochs": -1}),
        (sized, {}, {"max_steps": 11, "max_epochs": -1}),
        (iterable, {"num_workers": 1}, {}),
        (iterable, {}, {"reload_dataloaders_every_n_epochs": 1}),
        (sized, {}, {"reload_dataloaders_every_n_epochs": 1}),
        (sized, {}, {"val_check_interval": 0.5, "validates": True}),
        (iterable, {}, {"val_check_interval": 3, "validates": True}),
        (iterable, {}, {"validates": True}),
    ],
)
def test_all(size: int, make: Any, own: Any, options: Any) -> None:
    options = {"use_distributed_sampler": False, **options}
    batches = run_ranks(_trains, size, make, own, options)
    limit = options.get("limit_train_batches", 100)
    num = min(NUMBERS[0], limit)
    for rank, one in enumerate(batches):
        steps = 11 if "max_steps" in options else 3 * num
        if "max_steps" in options:
            assert len(one) == 11
        else:
            assert [n for n, *_ in one] == [*range(num)] * 3
            assert [is_last for _, is_last, _ in one] == [n == num - 1 for n in range(num)] * 3
        assert [is_repeat for _, _, is_repeat in one] == [n >= NUMBERS[rank] for n, *_ in one][:steps]


def _resumes(folder: Path, make: Callable[..., Any], step: int, options: dict[str, Any]) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    more = {**options, "enable_checkpointing": True}
    whole = fit(make(rank, NUMBERS[rank]), saver, **more)
    loader = make(rank, NUMBERS[rank])
    rest = fit(loader, ckpt_path=str(folder / f"step={step}.ckpt"), **options)
    done = step * options.get("accumulate_grad_batches", 1)
    if rank == 0: print(step, [n for n,*_ in rest.batches])
    ours, theirs = rest.batches, whole.batches[done:]
    if make is Positioned and not done % NUMBERS[0]:
        # Lightning counts on in the first epoch.
        ours, theirs = [one[1:] for one in ours], [one[1:] for one in theirs]
    assert ours == theirs, (ours, theirs)
    own = sum(not is_repeat for _, _, is_repeat in rest.batches)
    if size > 1:
        # A rank that resumes with repeats fetches the one that it repeats once more.
        print(rank, step, loader.fetched, own)
        assert own <= loader.fetched <= own + 2
    if WEIGHED:
        for ours, theirs in zip(rest.parameters(), whole.parameters(), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("make", [Positioned, SizedPositioned])
@pytest.mark.parametrize("step", [1, 3, 6, 8, 11, 16])
def test_resume(size: int, make: Any, step: int, tmp_path: Path) -> None:
    run_ranks(_resumes, size, tmp_path, make, step, {})
