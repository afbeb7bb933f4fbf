"""`DearStrategy(split=)`: weights of one process on the global batches, and what it gains."""

from __future__ import annotations

import re
import time
from collections import deque
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from lightning_dear.callbacks import batch_split
from lightning_dear.callbacks.batch_split import cut
from lightning_dear.collectives.gloo import PairwiseCollectives
from lightning_dear.planning import ThresholdFusion
from lightning_dear.telemetry.statistics import Instruments
from tests.distributed.harness import distributed
from tests.lightning.fitting import dear, new_trainer
from tests.lightning.nets import copies


class _Pause(torch.autograd.Function):
    """Takes some time in backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradient, None


class Regression(LightningModule):
    """Trains on a mean over the batch, slowly if asked to.

    Args:
        sample_s: Seconds of each sample in forward, and again in backward.
    """

    def __init__(self, sample_s: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1)).double()
        self.sample_s = sample_s
        self.sizes: list[int] = []

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        self.sizes.append(len(batch[0]))
        output = _Pause.apply(self.net(batch[0]), self.sample_s * len(batch[0]))
        return nn.functional.mse_loss(output, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def samples(number: int) -> TensorDataset:
    torch.manual_seed(2)
    return TensorDataset(torch.randn(number, 5).double(), torch.randn(number, 1).double())


def alone(number: int, total: int, num_epochs: int, drop_last: bool = False) -> list[Tensor]:
    """Weights of one process that trains on the global batches, in Lightning's order."""
    module, own = Regression(), samples(number)
    optimizer = module.configure_optimizers()
    order = DistributedSampler(own, 1, 0)
    for epoch in range(num_epochs):
        order.set_epoch(epoch)
        for inputs, targets in DataLoader(own, total, sampler=order, drop_last=drop_last):
            optimizer.zero_grad()
            nn.functional.mse_loss(module.net(inputs), targets).backward()
            optimizer.step()
    return copies(module)


def furthest(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


@distributed(world_sizes=[1, 2, 3])
def test_shares_train_as_one_process_on_the_global_batches(world_size: int) -> None:
    shares = [3, 1, 2][:world_size]
    module = Regression()
    trainer = new_trainer(dear(split=shares), max_epochs=3)
    loader = DataLoader(samples(7 * 4 * world_size + world_size + 1), 4, shuffle=True)
    trainer.fit(module, loader)
    expected = alone(7 * 4 * world_size + world_size + 1, 4 * world_size, 3)
    assert trainer.global_step == 24
    assert furthest(copies(module), expected) < 1e-12


class Watching(Callback):
    """Keeps when each batch begins, and what `split="auto"` says."""

    def __init__(self) -> None:
        self.began: list[float] = []
        self.said: list[str] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.began.append(time.perf_counter())

    def step_s(self) -> float:
        """Median of the last steps."""
        last = self.began[-9:]
        return median(later - one for one, later in zip(last, last[1:], strict=False))


def fitted(
    split: Any, num_batches: int, sample_s: float = 0.0, *, slower: int = 3, **options: Any
) -> tuple[Regression, Watching, Trainer]:
    """A fit in which rank 1 is slower than others, with 8 samples a rank and batch."""
    rank, size, watching = dist.get_rank(), dist.get_world_size(), Watching()
    module = Regression(sample_s * (slower if rank == 1 else 1))
    workers, checkpoint = options.pop("num_workers", 0), options.pop("ckpt_path", None)
    own = samples(8 * size * num_batches)
    trainer = new_trainer(dear(split=split), watching, **options)
    with (
        patch.object(batch_split, "rank_zero_info", watching.said.append),
        patch.object(batch_split, "rank_zero_warn", watching.said.append),
    ):
        loader = DataLoader(own, 8, shuffle=True, num_workers=workers)
        trainer.fit(module, loader, ckpt_path=checkpoint)
    return module, watching, trainer


@pytest.mark.alone
@distributed(world_sizes=[2])
def test_the_slower_rank_gets_less() -> None:
    _, equal, _ = fitted([1, 1], 12, 0.006)
    module, given, _ = fitted([3, 1], 12, 0.006)
    assert module.sizes == [4 if dist.get_rank() else 12] * 12
    assert equal.step_s() / given.step_s() >= 1.7
    module, found, _ = fitted("auto", 32, 0.006)
    assert equal.step_s() / found.step_s() >= 1.7
    (line,) = found.said
    assert re.fullmatch(
        r"split=\[12, 4\]: steps compute (1.9|2.0) times as fast as with equal sizes", line
    )
    assert furthest(copies(module), alone(8 * 2 * 32, 16, 1)) < 1e-12


@distributed(world_sizes=[2, 3])
def test_new_sizes_count_from_what_no_worker_has_fetched(world_size: int) -> None:
    """Ranks have fetched more or fewer batches ahead, since they have more or fewer workers."""
    num_workers = 1 + dist.get_rank() % 2
    module, watching, _ = fitted("auto", 40, 0.002, num_workers=num_workers)
    assert furthest(copies(module), alone(8 * world_size * 40, 8 * world_size, 1)) < 1e-12
    changed = next(n for n in range(20, 40) if len({*module.sizes[n:]}) == 1)
    # 20 batches were measured. Of those after it, 2 for each of 2 workers were fetched.
    assert 24 <= changed <= 25
    assert len(watching.said) == 1


@distributed(world_sizes=[2])
def test_equal_ranks_keep_equal_sizes() -> None:
    module, watching, _ = fitted("auto", 24, 0.004, slower=1)
    assert module.sizes[21:] == [8] * 3
    assert watching.said == ["split=[8, 8]: steps compute 1.0 times as fast as with equal sizes"]


@pytest.mark.alone
@distributed(world_sizes=[2], keeps_ranks=False)
def test_sizes_are_saved_and_count_in_a_resumed_fit() -> None:
    with TemporaryDirectory() as folder:
        path = [f"{folder}/auto.ckpt"]
        dist.broadcast_object_list(path)
        fitted("auto", 24, 0.002)[2].save_checkpoint(path[0])
        resumed, watching, _ = fitted("auto", 24, 0.002, ckpt_path=path[0], max_epochs=2)
        assert resumed.sizes == [4 if dist.get_rank() else 12] * 24
        assert watching.said == []
        assert furthest(copies(resumed), alone(8 * 2 * 24, 16, 2)) < 1e-12
        # Shares that are given count.
        resumed, _, _ = fitted([1, 1], 24, 0.002, ckpt_path=path[0], max_epochs=2)
        assert {*resumed.sizes} == {8}
        dist.barrier()


@distributed(world_sizes=[2], keeps_ranks=False)
def test_sizes_of_other_batches_are_measured_again() -> None:
    split = batch_split.BatchSplit("auto", ThresholdFusion())
    rank, own = dist.get_rank(), DataLoader(samples(64), 8)
    module = SimpleNamespace(trainer=SimpleNamespace(training=True))
    strategy = SimpleNamespace(lightning_module=module, global_rank=rank, world_size=2)
    for sizes, is_used in (([12, 4], True), ([12, 5], False), ([8, 4, 4], False)):
        split.load_state_dict({"sizes": sizes})
        loader = split.loader(own, strategy)
        first = len(next(iter(loader.batch_sampler)))
        assert first == (sizes[rank] if is_used else cut(16, (1, 2))[rank])


@distributed(world_sizes=[2])
def test_what_is_too_short_or_has_several_loaders() -> None:
    _, watching, _ = fitted("auto", 20)
    assert len(watching.said) == 1
    assert watching.said[0].startswith("split='auto' needs more than 20 batches to measure.")
    own, trainer = DataLoader(samples(64), 8), new_trainer(dear(split="auto"))
    with pytest.raises(ValueError, match="measures one training loader, and there are several"):
        trainer.fit(Regression(), [own, own])


@pytest.mark.alone
@distributed(world_sizes=[1, 2])
def test_measuring_while_accumulating(world_size: int) -> None:
    module, watching, _ = fitted("auto", 30, 0.002, accumulate_grad_batches=2)
    assert len(watching.said) == 1
    sizes = [4 if dist.get_rank() else 12] if world_size == 2 else [8]
    assert module.sizes[21:] == sizes * 9


def test_waits_between_batches_are_not_measured() -> None:
    """Such as those of a validation."""
    now_s = iter([*range(1, 100)])
    clock = SimpleNamespace(mark=lambda: next(now_s), seconds=float, is_free=False)
    instruments: Any = Instruments(clock, PairwiseCollectives(None, None, None))  # type: ignore[arg-type]
    pipeline = SimpleNamespace(training=SimpleNamespace(instruments=instruments))
    trainer = SimpleNamespace(strategy=SimpleNamespace(pipeline_of=lambda: pipeline))
    split: Any = batch_split.BatchSplit("auto", ThresholdFusion())
    split._batches = SimpleNamespace(sizes=deque([4, 8]))
    for _ in range(2):
        split.on_train_batch_start(trainer)
        with instruments.waiting("reduce_scatter", "gradients"):
            pass
        split.on_train_batch_end(trainer)
        with instruments.waiting("all_gather", "validation_step"):
            pass
    assert split._timed == [(4, [1, 2, 3, 4]), (8, [5, 6, 7, 8])]
    assert batch_split._cost(split._timed, clock) == (2.0, 0.0)


@pytest.mark.parametrize(("slower", "shares"), [(1.04, [100, 100]), (3.0, [150, 50])])
def test_sizes_that_gain_little_are_left_equal(slower: float, shares: list[int]) -> None:
    split: Any = batch_split.BatchSplit("auto", ThresholdFusion())
    whole = BatchSampler(DistributedSampler(samples(400), 1, 0), 200, False)
    split._batches = batch_split.SplitBatches(whole, 0, 2, None)
    split._timed = [(100, [0.0, 1.0])] * 20
    told = [((0.0, 1.0), (0, 7)), ((0.0, slower), (0, 5))]
    with patch.object(batch_split, "from_all_ranks", lambda _: told):
        split._decide(SimpleNamespace(seconds=float))
    assert split._batches.shares == shares
    assert split._batches.since == (0, 7)


@distributed(world_sizes=[2])
def test_batches_of_one_sample_stay_equal() -> None:
    watching, module = Watching(), Regression()
    with patch.object(batch_split, "rank_zero_info", watching.said.append):
        new_trainer(dear(split="auto")).fit(module, DataLoader(samples(48), 1))
    assert module.sizes == [1] * 24
    assert len(watching.said) == 1
    assert watching.said[0].startswith("split=[1, 1]: steps compute 1.0 times")
