"""How global batches are cut among ranks by shares, and which loaders cannot be cut."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils import data
from torch.utils.data import DataLoader

from lightning_dear import DearStrategy
from lightning_dear.callbacks.batch_split import BatchSplit, SplitBatches, cut, quickest
from lightning_dear.callbacks.guards import CompletionGuard
from lightning_dear.planning import ThresholdFusion
from tests.distributed.harness import distributed
from tests.lightning.fitting import ddp, dear, new_trainer
from tests.lightning.nets import Net


@pytest.mark.parametrize(
    ("num_samples", "shares", "sizes"),
    [
        (8, [3, 1], [6, 2]),
        (16, [3, 1], [12, 4]),
        (10, [1, 1, 1], [4, 3, 3]),
        (10, [3, 1], [8, 2]),
        (10, [3, 1, 1], [6, 2, 2]),
        (4, [1, 1, 1], [2, 1, 1]),
        (2, [1, 1, 1], [1, 1, 0]),
        (2, [1, 1, 100], [1, 1, 0]),
        (3, [1, 1, 100], [1, 1, 1]),
        (8, [1, 1, 100], [1, 1, 6]),
        (7, [2, 2], [4, 3]),
        (0, [3, 1], [0, 0]),
        (5, [7], [5]),
    ],
)
def test_global_batches_are_cut_by_shares(
    num_samples: int, shares: Sequence[int], sizes: Sequence[int]
) -> None:
    assert cut(num_samples, tuple(shares)) == sizes


def test_cuts_are_whole_and_leave_nobody_out() -> None:
    for num_samples in range(40):
        for shares in ((1,), (3, 1), (5, 2, 2), (1, 9, 1, 30)):
            sizes = cut(num_samples, shares)
            assert sum(sizes) == num_samples
            assert min(sizes) >= 1 or num_samples < len(shares)


def test_sizes_are_those_of_the_quickest_slowest_rank() -> None:
    """Against all ways to cut 12 samples among 3 ranks."""
    torch.manual_seed(0)
    for _ in range(50):
        costs = [(a, b) for a, b in torch.rand(3, 2).tolist()]
        sizes, seconds = quickest(costs, [4, 4, 4])
        slowest = [
            max(a + b * n for (a, b), n in zip(costs, (i, j, 12 - i - j), strict=True))
            for i in range(1, 11)
            for j in range(1, 12 - i)
        ]
        best = max(a + b * n for (a, b), n in zip(costs, sizes, strict=True))
        assert sum(sizes) == 12
        assert best == pytest.approx(min(slowest))
        assert seconds == best


def test_equal_ranks_keep_their_sizes() -> None:
    assert quickest([(1.0, 0.5)] * 3, [4, 4, 4]) == ([4, 4, 4], 3.0)
    assert quickest([(1.0, 0.0), (0.1, 0.1)], [4, 4]) == ([4, 4], 1.0)


@pytest.mark.parametrize(
    ("split", "kind"),
    [
        (3, TypeError),
        ([1.5, 1], TypeError),
        ([True, 1], TypeError),
        ([], TypeError),
        (["3", "1"], TypeError),
        ("fast", ValueError),
        ([3, 0], ValueError),
        ([3, -1], ValueError),
    ],
)
def test_shares_are_checked_at_construction(split: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"split must be 'auto' or whole numbers > 0, such as"):
        DearStrategy(split=split)


def test_samples_count_alike() -> None:
    assert DearStrategy(split=[3, 1])._of_engine["weighs"]
    with pytest.raises(ValueError, match=r"split= implies, is not for compressor='signsgd'"):
        DearStrategy(split=[3, 1], compressor="signsgd")


def test_one_of_two_measures_the_first_steps() -> None:
    DearStrategy(split=[1, 1], fusion="auto")
    with pytest.raises(ValueError, match=r"split='auto' and fusion='auto' would both measure"):
        DearStrategy(split="auto", fusion="auto")


class _Numbers(data.Dataset[Any]):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, number: int) -> Any:
        return torch.full((7,), number / 100), number


class _Keeping(Callback):
    """Keeps the numbers of the samples that this rank has trained, by epoch and batch."""

    def __init__(self) -> None:
        self.epochs: list[list[list[int]]] = []
        self._epoch = -1

    def on_train_batch_start(self, trainer: Any, module: Any, batch: list[Tensor], _: int) -> None:
        if trainer.current_epoch != self._epoch:
            self._epoch = trainer.current_epoch
            self.epochs.append([])
        self.epochs[-1].append(batch[1].tolist())


class _NumberNet(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss([batch[0], batch[1] % 3])


def _trained(
    strategy: Any, loader: Any, *callbacks: Callback, resumed: str | None = None, **options: Any
) -> list[list[list[list[int]]]]:
    """Every rank's batches of every epoch. Collective."""
    kept, net = _Keeping(), _NumberNet()
    torch.manual_seed(dist.get_rank())
    trainer = new_trainer(strategy, kept, *callbacks, **{"max_epochs": 2, **options})
    trainer.fit(net, loader, ckpt_path=resumed)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, kept.epochs)
    return everyone


def _joined(ranks: list[list[list[list[int]]]], epoch: int) -> list[list[int]]:
    """The global batches of an epoch."""
    return [sum(parts, []) for parts in zip(*(one[epoch] for one in ranks), strict=True)]


def _shuffled(num_samples: int, epoch: int) -> list[int]:
    sampler = data.DistributedSampler(_Numbers(num_samples), 1, 0)
    sampler.set_epoch(epoch)
    return list(sampler)


@distributed(world_sizes=[1, 2, 3])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("is_replaced", [True, False])
def test_ranks_train_their_parts_of_the_same_shuffled_batches(
    num_workers: int, is_replaced: bool, world_size: int
) -> None:
    shares, total = (3, 1, 2)[:world_size], 4 * world_size
    keeps = {"persistent_workers": True} if num_workers else {}
    loader = DataLoader(
        _Numbers(5 * total), batch_size=4, shuffle=True, num_workers=num_workers, **keeps
    )
    options = {"use_distributed_sampler": is_replaced}
    ranks = _trained(dear(split=shares), loader, **options)
    for rank, epochs in enumerate(ranks):
        assert {len(part) for part in sum(epochs, [])} == {cut(total, shares)[rank]}
    for epoch in (0, 1):
        order = _shuffled(5 * total, epoch)
        assert _joined(ranks, epoch) == [
            order[start : start + total] for start in range(0, len(order), total)
        ]


@distributed(world_sizes=[3])
def test_the_last_batch_is_cut_or_dropped() -> None:
    order = _shuffled(16, 0)
    ranks = _trained(dear(split=[2, 1, 1]), DataLoader(_Numbers(16), 4, shuffle=True))
    assert _joined(ranks, 0) == [order[:12], order[12:]]
    assert [len(epochs[0][-1]) for epochs in ranks] == cut(4, (2, 1, 1))
    loader = DataLoader(_Numbers(16), 4, shuffle=True, drop_last=True)
    assert _joined(_trained(dear(split=[2, 1, 1]), loader), 0) == [order[:12]]
    sampler = data.DistributedSampler(_Numbers(16), 1, 0)
    for drops, num_batches in ((True, 1), (False, 2)):
        whole = data.BatchSampler(sampler, 12, drops)
        batches = SplitBatches(whole, 0, 3, [2, 1, 1])
        assert len(batches) == len([*batches]) == num_batches


def test_a_second_iteration_does_not_forget_what_was_fetched() -> None:
    whole = data.BatchSampler(data.DistributedSampler(_Numbers(16), 1, 0), 4, False)
    batches = SplitBatches(whole, 0, 2, None)
    first = iter(batches)
    assert [len(next(first)) for _ in range(3)] == [1, 3, 1]
    assert len(next(iter(batches))) == 1
    assert batches.position == (0, 3)
    batches.shares, batches.since = [3, 1], batches.position
    assert len(next(first)) == 3
    whole.sampler.set_epoch(1)
    assert [len(part) for part in batches] == [3] * 4
    assert batches.position == (1, 4)


@distributed(world_sizes=[2])
def test_what_has_an_order_of_its_own_keeps_it() -> None:
    loader = DataLoader(_Numbers(16), 4)
    ranks = _trained(dear(split=[3, 1]), loader, use_distributed_sampler=False)
    assert _joined(ranks, 0) == [[*range(8)], [*range(8, 16)]]
    sampler = data.DistributedSampler(_Numbers(16), shuffle=False)
    ranks = _trained(dear(split=[3, 1]), DataLoader(_Numbers(16), 4, sampler=sampler))
    assert _joined(ranks, 1) == [[*range(8)], [*range(8, 16)]]


@distributed(world_sizes=[2])
def test_a_sampler_that_lightning_wraps_draws_alike_on_all_ranks() -> None:
    sampler = data.SubsetRandomSampler([*range(0, 32, 2)])
    ranks = _trained(dear(split=[3, 1]), DataLoader(_Numbers(32), 4, sampler=sampler))
    batches = [sorted(sum(_joined(ranks, epoch), [])) for epoch in (0, 1)]
    assert batches == [[*range(0, 32, 2)]] * 2
    assert _joined(ranks, 0) != _joined(ranks, 1)


@distributed(world_sizes=[2, 3], keeps_ranks=False)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_global_batches_are_lightnings_own_also_if_resumed(
    num_workers: int, world_size: int
) -> None:
    with TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        seen = {}
        for name, strategy in (("ddp", ddp), ("dear", partial(dear, split=[3, 1, 1][:world_size]))):
            saving = ModelCheckpoint(f"{shared[0]}/{name}", every_n_train_steps=6)
            numbers = _Numbers(16 * world_size)
            loader = DataLoader(numbers, 4, shuffle=True, num_workers=num_workers)
            whole = _trained(strategy(), loader, saving, enable_checkpointing=True)
            rest = _trained(strategy(), loader, resumed=saving.best_model_path, max_epochs=3)
            both = [_joined(ranks, epoch) for ranks in (whole, rest) for epoch in (0, 1)]
            seen[name] = [[sorted(batch) for batch in epoch] for epoch in both]
        dist.barrier()
    assert [len(epoch) for epoch in seen["dear"]] == [4, 4, 2, 4]
    assert seen["dear"] == seen["ddp"]


class _Loader(DataLoader[Any]):
    """Cannot be made anew from its attributes."""

    def __init__(self, size: int) -> None:
        super().__init__(
            _Numbers(16), batch_size=size, sampler=data.DistributedSampler(_Numbers(16))
        )


@distributed(world_sizes=[2])
def test_a_loader_of_another_class_stays_what_it_is() -> None:
    kinds = []

    class _Kind(Callback):
        def on_train_start(self, trainer: Any, _: Any) -> None:
            kinds.append(trainer.train_dataloader.__class__)

    trainer = new_trainer(dear(split=[3, 1]), _Kind())
    trainer.fit(_NumberNet(), _Loader(4))
    assert kinds == [_Loader]


class _Stream(data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(_Numbers(8)[number] for number in range(8))


class _Batches:
    def __iter__(self) -> Any:
        return iter([[torch.zeros(4, 7), torch.zeros(4)]] * 4)


class _Pairs(data.BatchSampler):
    pass


def _loader_of(kind: str) -> Any:
    numbers = _Numbers(16)
    return {
        "an IterableDataset": lambda: DataLoader(_Stream(), 4),
        "_Batches": _Batches,
        "batch_sampler=_Pairs": lambda: DataLoader(
            numbers, batch_sampler=_Pairs(data.SequentialSampler(numbers), 2, False)
        ),
        "batch_sampler=NoneType": lambda: DataLoader(numbers, batch_size=None),
        "sampler=RandomSampler": lambda: DataLoader(
            numbers, 4, sampler=data.RandomSampler(numbers, replacement=True)
        ),
        "sampler=SubsetRandomSampler": lambda: DataLoader(
            numbers, 4, sampler=data.SubsetRandomSampler([1, 2, 3])
        ),
    }[kind]()


REFUSED = (
    "an IterableDataset",
    "_Batches",
    "batch_sampler=_Pairs",
    "batch_sampler=NoneType",
    "sampler=RandomSampler",
    "sampler=SubsetRandomSampler",
)


@distributed(world_sizes=[2], keeps_ranks=False)
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_cut_is_refused_by_name_on_all_ranks(kind: str) -> None:
    own = kind if dist.get_rank() else None
    loader = DataLoader(_Numbers(16), 4) if own is None else _loader_of(kind)
    with pytest.raises(ValueError, match=rf"cut the batches of rank 1: it has {kind}\. Train with"):
        _trained(dear(split=[3, 1]), loader, use_distributed_sampler=False)


@distributed(world_sizes=[2], keeps_ranks=False)
@pytest.mark.parametrize(
    ("shares", "options", "words"),
    [
        ([[3, 1, 1]] * 2, [(16, 4)] * 2, r"split=\[3, 1, 1\] must have one share for each of 2"),
        (
            [[3, 1], [1, 3]],
            [(16, 4)] * 2,
            "rank 1: it has {.*}. Train with .* the same: rank 0 has {.*}. Or",
        ),
        (
            [[3, 1]] * 2,
            [(16, 4), (16, 5)],
            "rank 1: it has {.*}. Train with .* the same: rank 0 has {.*}. Or",
        ),
        (
            [[3, 1]] * 2,
            [(16, 4), (15, 4)],
            "rank 1: it has {.*}. Train with .* the same: rank 0 has {.*}. Or",
        ),
        ([[3, 1]] * 2, [(1, 4)] * 2, "loader of rank 1 has no batch, and others have"),
    ],
)
def test_ranks_that_do_not_fit_are_refused_on_all(shares: Any, options: Any, words: str) -> None:
    rank = dist.get_rank()
    num_samples, batch_size = options[rank]
    loader = DataLoader(_Numbers(num_samples), batch_size)
    with pytest.raises(ValueError, match=words):
        _trained(dear(split=shares[rank]), loader, use_distributed_sampler=False)


@distributed(world_sizes=[2], keeps_ranks=False)
def test_workers_on_some_ranks_alone_are_refused() -> None:
    """In a resumed epoch these would draw another order than the others."""
    loader = DataLoader(_Numbers(16), 4, num_workers=dist.get_rank())
    with pytest.raises(ValueError, match=r"rank 1: it has .*'has_workers': True.*: rank 0 has"):
        _trained(dear(split=[3, 1]), loader)


@distributed(world_sizes=[2])
def test_workers_of_the_loader_that_was_passed_are_not_used() -> None:
    sampler = data.DistributedSampler(_Numbers(16), shuffle=False)
    workers: Any = {"num_workers": 1, "persistent_workers": True}
    loader = DataLoader(_Numbers(16), 4, sampler=sampler, **workers)
    assert next(iter(loader))[1].tolist() == [dist.get_rank() + 2 * n for n in range(4)]
    ranks = _trained(dear(split=[3, 1]), loader)
    assert _joined(ranks, 0) == [[*range(8)], [*range(8, 16)]]


@distributed(world_sizes=[2])
def test_loaders_that_do_not_train_are_left_alone() -> None:
    batches = []

    class _Validating(_NumberNet):
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            batches.append(batch[1].tolist())

    trainer = new_trainer(dear(split=[3, 1]))
    trainer.fit(_Validating(), DataLoader(_Numbers(16), 4), DataLoader(_Stream(), 4))
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_no_weights_are_waited_for_because_of_it() -> None:
    split = BatchSplit("auto", ThresholdFusion())
    guard = CompletionGuard(lambda _: None)
    assert guard.reader_of("on_train_batch_start", [split, LightningModule()]) is None
