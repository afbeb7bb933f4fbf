"""Training loaders of which ranks have unequal numbers of batches: all ranks end together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset
from torchmetrics import MeanMetric

from lightning_dear.collectives.gloo import PairwiseCollectives
from lightning_dear.strategy import base, loaders
from lightning_dear.strategy.connections import _ASKS as asks_for_signals
from lightning_dear.strategy.loaders import _STATES, _StatefulLoader
from tests.distributed.harness import run_ranks
from tests.lightning.fitting import dear, new_trainer
from tests.training.three_ways import new_native

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
        self.log(
            "given_epoch",
            loss,
            on_epoch=True,
            on_step=False,
            sync_dist=True,
            batch_size=len(batch[0]),
        )
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self.trainer.global_step)

    def on_train_epoch_end(self) -> None:
        logged = self.trainer.callback_metrics
        if self.batches:
            self.means.append(float(logged["loss_epoch"]))
            assert logged["given_epoch"] == logged["loss_epoch"]
        self.log("end", 1.0)
        self.log("end_of_all", 1.0, sync_dist=True)

    def configure_optimizers(self) -> Any:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), 0.01)


def fit(loader: Any, *callbacks: Callback, net: Net | None = None, **options: Any) -> Net:
    """Fits with samples as weights, and checks that ranks have done the same."""
    net, path = net or Net(), options.pop("ckpt_path", None)
    validates = options.pop("validates", False)
    # Each rank's loader gives that rank's own samples.
    options = {"max_epochs": 3, "use_distributed_sampler": False, **options}
    trainer = new_trainer(dear(weights="samples"), *callbacks, **options)
    trainer.fit(net, loader, sized(0, 1) if validates else None, ckpt_path=path)
    weights = [one.detach().clone() for one in net.parameters()]
    told = [(number, is_last) for number, is_last, _ in net.batches]
    logged = {
        name: float(one) for name, one in trainer.callback_metrics.items() if "metric" not in name
    }
    logged.pop("loss_step", None)
    facts = told, trainer.global_step, trainer.current_epoch, net.validated, net.means, logged
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (facts, [one.tolist() for one in weights]))
    for one in everyone:
        assert one == everyone[0], (one[0], everyone[0][0])
    return net


def reference(
    numbers: Sequence[int],
    optimizer: str = "adamw",
    epochs: int = 3,
    every: int = 1,
    limit: int | None = None,
) -> Net:
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
                total, count = total + loss.item() * len(batch[0]), count + len(batch[0])
                (loss * len(batch[0]) / n * num_steps / every).backward()
            step.step()
        net.means.append(total / count)
    return net


def assert_is_of_one_process(net: Net, other: Net) -> None:
    """Weights and means of epochs are those of one process, except for rounding."""
    for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert (ours - theirs).abs().max() <= 1e-14, (ours - theirs).abs().max()
    assert net.means == pytest.approx(other.means, rel=1e-14)


def _trains(make: Callable[..., Any], own: dict[str, Any], options: dict[str, Any]) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    numbers, num_epochs = NUMBERS[:size], 3
    for optimizer in ("adamw", "sgd"):
        net = fit(make(rank, numbers[rank], **own), net=Net(optimizer), **options)
        limit, every = options.get("limit_train_batches"), options.get("accumulate_grad_batches", 1)
        length = NUMBERS[0] if limit is None else int(limit * NUMBERS[0]) if limit < 1 else limit
        order = [*range(length)] * num_epochs
        if "max_steps" in options:
            del order[options["max_steps"] :]
        else:
            other = reference(numbers, optimizer, num_epochs, every, length)
            assert_is_of_one_process(net, other)
        told = [(n, n == length - 1, n >= numbers[rank]) for n in order]
        assert net.batches == told, (net.batches, told)
        if options.get("validates"):
            steps = {0.5: 4, 3: 3}.get(options.get("val_check_interval", 0.0), 8)
            assert net.validated == [
                n + 8 * epoch for epoch in range(3) for n in range(steps, 9, steps)
            ]


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
        (sized, {}, {"limit_train_batches": 0.75}),
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
def test_all_ranks_end_together_with_the_weights_of_one_process(
    size: int, make: Any, own: dict[str, Any], options: dict[str, Any]
) -> None:
    run_ranks(_trains, size, make, own, options)


def _resumes(folder: Path, make: Callable[..., Any], options: dict[str, Any]) -> None:
    rank = dist.get_rank()
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    whole = fit(make(rank, NUMBERS[rank]), saver, enable_checkpointing=True, **options)
    every = options.get("accumulate_grad_batches", 1)
    for step in (1, 3, 6, 8, 11, 16):
        loader, done = make(rank, NUMBERS[rank]), step * every
        rest = fit(loader, ckpt_path=str(folder / f"step={step}.ckpt"), **options)
        ours, theirs = rest.batches, whole.batches[done:]
        if make is Positioned and not done % NUMBERS[0]:
            # Lightning goes on counting batches in the first epoch.
            ours, theirs = ([(0, *one[1:]) for one in told] for told in (ours, theirs))
        assert ours == theirs, (step, ours, theirs)
        # One batch more is fetched, in order to repeat it.
        num_own = sum(not one[-1] for one in theirs)
        assert num_own <= loader.fetched <= num_own + 2
        for one, other in zip(rest.parameters(), whole.parameters(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [Positioned, SizedPositioned])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2, "max_epochs": 6}])
def test_a_loader_goes_on_behind_the_batch_that_was_trained(
    size: int, make: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    run_ranks(_resumes, size, tmp_path, make, options)


class _Stream(Positioned):
    """Never ends. It goes on where it was, also with another iterator."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.position = (self.position + 1) % len(self.batches)
            yield self.batches[self.position]

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def _streams(folder: Path) -> None:
    rank = dist.get_rank()
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    limits = {"limit_train_batches": 3, "max_epochs": 2}
    whole = fit(_Stream(rank, 5), saver, enable_checkpointing=True, **limits)
    rest = fit(_Stream(rank, 5), ckpt_path=str(folder / "step=3.ckpt"), **limits)
    assert rest.batches == whole.batches[3:]
    for one, other in zip(rest.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_stream_goes_on_behind_the_limit_of_an_epoch(tmp_path: Path) -> None:
    run_ranks(_streams, 2, tmp_path)


class _Fails(Callback):
    """Fails in the training of the fifth batch, or before, on all ranks, and saves."""

    def __init__(self, path: Path, hook: str) -> None:
        self.path = path
        setattr(self, hook, self._fail)

    def _fail(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 4:
            raise ArithmeticError

    def on_exception(self, trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


def _fails(path: Path, make: Callable[..., Any], hook: str) -> None:
    rank = dist.get_rank()
    with pytest.raises(ArithmeticError):
        fit(make(rank, NUMBERS[rank]), _Fails(path, hook))
    rest = fit(make(rank, NUMBERS[rank]), ckpt_path=str(path))
    assert [n for n, *_ in rest.batches] == [*range(4, 8), *range(8), *range(8)]
    assert [is_repeat for *_, is_repeat in rest.batches[:4]] == [
        n >= NUMBERS[rank] for n in range(4, 8)
    ]


@pytest.mark.parametrize("hook", ["on_before_zero_grad", "on_train_batch_start"])
@pytest.mark.parametrize("make", [Positioned, SizedPositioned])
def test_a_batch_whose_training_failed_is_given_again(make: Any, hook: str, tmp_path: Path) -> None:
    run_ranks(_fails, 2, tmp_path / "failed.ckpt", make, hook)


def _other_states() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    loader = Positioned(rank, NUMBERS[rank])
    strategy = mock.Mock(world_size=size, global_rank=rank)
    wrapped = _StatefulLoader(loader, mock.Mock(strategy=strategy), [-1] * size)
    wrapped.load_state_dict({"position": 3})
    assert loader.start == 3
    with pytest.warns(UserWarning, match="states of 3 ranks'.* 2 ranks train: .* anew"):
        wrapped.load_state_dict({_STATES: [({"position": 5}, 1)] * 3})
    assert loader.start == 3


def test_a_state_of_a_plain_loader_is_loaded_and_one_of_other_ranks_is_not() -> None:
    run_ranks(_other_states, 2)


def _asks(make: Callable[..., Any], options: dict[str, Any]) -> tuple[int, int]:
    """How often ranks asked each other for lengths and ends, and all in all in training."""
    rank, counts = dist.get_rank(), [0, 0]

    def counting(kind: Any, name: str, number: int) -> Any:
        call = getattr(kind, name)

        def counted(*given: Any, **named: Any) -> Any:
            counts[number] += 1
            return call(*given, **named)

        return mock.patch.object(kind, name, counted)

    class _Notes(Callback):
        def on_train_start(self, *_: Any) -> None:
            counts[1] = 0

    with (
        counting(loaders, "from_all_ranks", 0),
        counting(PairwiseCollectives, "all_gather_object", 1),
    ):
        fit(make(rank, NUMBERS[rank]), _Notes(), **options)
    return counts[0], counts[1]


@pytest.mark.parametrize("every", [1, 2])
def test_no_batch_asks_where_rounds_tell(every: int) -> None:
    options = {"accumulate_grad_batches": every}
    (asks, _), _ = run_ranks(_asks, 2, sized, options)
    assert asks == 1
    (asks, gathers), _ = run_ranks(_asks, 2, iterable, options)
    # Once for the length, and once in each epoch. Batches without a step ask for signals anyway.
    assert asks == 4 or every == 2 and not asks_for_signals
    (_, others), _ = run_ranks(_asks, 2, sized, options)
    assert gathers == others


def _logs_at_the_end() -> None:
    rank = dist.get_rank()
    net = fit(sized(rank, NUMBERS[rank]))
    logged = net.trainer.callback_metrics
    assert float(logged["end"]) == float(logged["end_of_all"]) == 1.0


def test_what_is_logged_at_the_end_of_an_epoch_counts() -> None:
    run_ranks(_logs_at_the_end, 2)


# --- what is refused ------------------------------------------------------------------------------


class _TakesBatches(Net):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        raise AssertionError


def _empty(make: Callable[..., Any], rank: int) -> Any:
    return make(rank, 3 - 3 * rank)


def _several(make: Callable[..., Any], rank: int) -> Any:
    return CombinedLoader([make(0, 3 + rank), make(0, 2)], "max_size_cycle")


def _any(make: Callable[..., Any], rank: int) -> Any:
    return make(rank, 2)


def _refuses(make: Callable[[int], Any], message: str, kind: type[Net] = Net) -> None:
    net = kind()
    with pytest.raises((ValueError, TypeError), match=message):
        fit(make(dist.get_rank()), net=net, max_epochs=1)
    assert not net.batches


@pytest.mark.parametrize(
    ("make", "message", "kind"),
    [
        (partial(_empty, iterable), "loader of rank 1 has no batch", Net),
        (partial(_empty, SizedPositioned), "loader of rank 1 has no batch", Net),
        (partial(_empty, Positioned), "loader of rank 1 has no batch", Net),
        (partial(_any, sized), "dataloader_iter", _TakesBatches),
        (partial(_several, sized), "several training loaders", Net),
        (partial(_several, iterable), "several training loaders", Net),
    ],
)
def test_it_is_refused_on_all_ranks(make: Any, message: str, kind: type[Net]) -> None:
    run_ranks(_refuses, 2, make, message, kind)


class _Plain(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


def _refuses_wrong_length() -> None:
    # Only that rank sees it, and tells the others.
    with pytest.raises(Exception, match="rank 1 has no batch|Rank 1"):
        fit(_WrongLength(0, 2 - 2 * dist.get_rank()), net=_Plain(), max_epochs=1)


@pytest.mark.slow
def test_a_rank_whose_length_was_wrong_and_that_has_no_batch_ends_all() -> None:
    run_ranks(_refuses_wrong_length, 2)


# --- other loaders, and what else takes their batches ---------------------------------------------


class _WrongLength(Positioned):
    def __len__(self) -> int:
        return 6


class _WithNone(Positioned):
    def _give(self) -> Iterator[Any]:
        for one in super()._give():
            yield None
            yield one


def _other_loaders() -> None:
    rank = dist.get_rank()
    net = fit(_WithNone(rank, NUMBERS[rank]))
    assert_is_of_one_process(net, reference(NUMBERS[:2]))
    # Repeated by all ranks, whose weights stay.
    net = fit(_WrongLength(rank, 4 - rank), max_epochs=1)
    assert [is_repeat for *_, is_repeat in net.batches] == [n >= 4 - rank for n in range(6)]
    assert fit(Positioned(rank, 0)).batches == []
    # Only rank 0 knows its length.
    net = fit((sized, iterable)[rank](rank, NUMBERS[rank]))
    assert_is_of_one_process(net, reference(NUMBERS[:2]))


def test_other_loaders() -> None:
    run_ranks(_other_loaders, 2)


class _Combined(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch[0], batch_idx)


def _several_even() -> None:
    loader = CombinedLoader([sized(dist.get_rank(), 3), sized(0, 2)], "max_size_cycle")
    net = fit(loader, net=_Combined())
    assert_is_of_one_process(net, reference((3, 3)))


def test_several_loaders_of_equal_length() -> None:
    run_ranks(_several_even, 2)


class _Manual(Net):
    """Steps by itself, and weighs each batch twice, also repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        self.trainer.strategy.weigh(2 * len(batch[0]))  # type: ignore[attr-defined]
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def _manual() -> None:
    rank = dist.get_rank()
    for make in (iterable, sized):
        net = fit(make(rank, NUMBERS[rank]), net=_Manual())
        assert_is_of_one_process(net, reference(NUMBERS[:2]))


def test_a_repeat_weighs_nothing_whatever_the_user_says() -> None:
    run_ranks(_manual, 2)


class _Looks(Callback):
    """Takes batches on rank 0 alone, and reads what the loader is."""

    def __init__(self) -> None:
        for moment in ("train_epoch_start", "train_batch_start", "train_epoch_end"):
            setattr(self, f"on_{moment}", self._look)

    def _look(self, trainer: Trainer, *_: Any) -> None:
        loader: Any = trainer.train_dataloader
        assert isinstance(loader, DataLoader)
        assert loader.batch_size == SIZES[trainer.global_rank]
        loader.worker_init_fn = None
        if trainer.global_rank == 0:
            assert len(list(loader)) == NUMBERS[0]
            assert len(next(iter(loader))[0]) == SIZES[0]


def _looks() -> None:
    rank = dist.get_rank()
    for make in (iterable, sized):
        net = fit(make(rank, NUMBERS[rank]), _Looks())
        assert_is_of_one_process(net, reference(NUMBERS[:2]))
        assert [is_repeat for *_, is_repeat in net.batches] == [
            n >= NUMBERS[rank] for n in range(8)
        ] * 3


def test_others_take_their_own_batches_and_no_rank_waits() -> None:
    run_ranks(_looks, 2)


def _lightnings_sampler() -> None:
    size, seen = dist.get_world_size(), []
    numbers = TensorDataset(
        torch.arange(10, dtype=torch.float64).reshape(10, 1).expand(10, WIDTH),
        torch.zeros(10, 1, dtype=torch.float64),
    )

    class _Keeps(Callback):
        def on_train_batch_start(
            self, trainer: Trainer, _: Any, batch: Any, batch_idx: int
        ) -> None:
            seen.append(batch[0][:, 0].tolist())
            loader: Any = trainer.train_dataloader
            assert isinstance(loader.sampler, DistributedSampler)

    net = Net()
    with mock.patch.dict(os.environ, {"PL_SEED_WORKERS": "1"}):
        trainer = fit(
            DataLoader(numbers, 2, shuffle=True),
            _Keeps(),
            net=net,
            max_epochs=2,
            use_distributed_sampler=True,
        ).trainer
    loader: Any = trainer.train_dataloader
    assert loader.inner.worker_init_fn is loader.worker_init_fn is not None
    everyone: list[Any] = [None] * size
    dist.all_gather_object(
        everyone, [sum(seen[: len(seen) // 2], []), sum(seen[len(seen) // 2 :], [])]
    )
    for epoch in (0, 1):
        assert {one for given in everyone for one in given[epoch]} == {*range(10)}
    assert everyone[0][0] != everyone[0][1]


def test_lightning_splits_and_shuffles_as_ever() -> None:
    run_ranks(_lightnings_sampler, 2)
    run_ranks(_lightnings_sampler, 3)


def _stream() -> None:
    """A loader that is an iterator: no batch of it is lost between epochs."""
    rank = dist.get_rank()
    loader = (one for one in sized(rank, 9))
    net = fit(loader, limit_train_batches=3)
    assert len(net.batches) == 9
    assert not any(is_repeat for *_, is_repeat in net.batches)


def test_no_batch_is_lost_between_epochs_of_limited_length() -> None:
    run_ranks(_stream, 2)


def _late() -> None:
    rank = dist.get_rank()
    with mock.patch.object(base, "new_collectives", new_native):
        net = fit(iterable(rank, NUMBERS[rank]))
    assert_is_of_one_process(net, reference(NUMBERS[:2]))


def test_with_nccl() -> None:
    run_ranks(_late, 2, keeps_ranks=False)
