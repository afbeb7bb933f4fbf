"""Cuts each global batch among ranks, by shares that are given or found from the ranks' speeds.

A global batch is what all ranks train on at once: `batch_size` times the number of ranks.
"""

import os
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import median
from typing import Any

import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils import data
from typing_extensions import override

from lightning_dear import planning, private_names
from lightning_dear.callbacks.fusion_tuner import option_of
from lightning_dear.collectives.store import from_all_ranks
from lightning_dear.telemetry.clock import Clock

NUM_MEASURED = 20
"""Number of batches in which split="auto" measures. The first ones, which warm up, do not count."""

_NUM_WARM_UP, _LEAST_GAIN = 4, 1.05


def quickest(costs: Sequence[tuple[float, float]], sizes: list[int]) -> tuple[list[int], float]:
    """Returns the sizes, with the same sum, for which the slowest rank needs the least time.

    Of equally quick sizes it returns those that move the fewest samples. A rank keeps at least one
    sample if it has any.

    Args:
        costs: (a, b) of each rank, in seconds: n samples take a + b n.
        sizes: Number of samples of each rank to begin with. Not mutated.

    Returns:
        The sizes, and the time of the slowest rank in seconds.
    """
    sizes = list(sizes)
    while True:
        now = [a + b * size for (a, b), size in zip(costs, sizes, strict=True)]
        with_one_more = [seconds + b for seconds, (_, b) in zip(now, costs, strict=True)]
        slow, fast = now.index(max(now)), with_one_more.index(min(with_one_more))
        # A rank that is slow whatever its size keeps its samples.
        if with_one_more[fast] >= now[slow] or costs[slow][1] == 0 or sizes[slow] == 1:
            return sizes, now[slow]
        sizes[slow] -= 1
        sizes[fast] += 1


@lru_cache
def cut(num_samples: int, shares: tuple[int, ...]) -> list[int]:
    """Returns how many of `num_samples` each rank gets: whole numbers with this sum. Do not mutate.

    Where shares do not divide the samples, the largest number of samples per share is as small as
    possible. (3, 1) cut 10 samples into 8 and 2, which are 2.7 and 2 per share; 7 and 3 would be
    2.3 and 3. With at least as many samples as ranks every rank gets one or more. With fewer the
    first ranks get one each, whatever the shares are. So the number of a rank's batches does not
    depend on the shares.
    """
    each, rest = divmod(num_samples, len(shares))
    equal = [each + (rank < rest) for rank in range(len(shares))]
    return quickest([(0.0, 1 / share) for share in shares], equal)[0]


@dataclass(eq=False)
class SplitBatches(data.Sampler[list[int]]):
    """Gives this rank's part of every global batch: a batch sampler.

    All ranks have the same order of samples and cut it at the same places. A rank that gets no
    sample of the last, shorter global batch has one batch less there.

    Attributes:
        whole: A torch `BatchSampler` that gives the global batches. Its sampler is a
            `DistributedSampler` for one rank, which gives all samples in order.
        rank: This rank.
        num_ranks: Number of ranks.
        shares: Shares of the ranks; to be assigned to together with `since`. None means that speeds
            are measured: every rank gets a smaller and a larger part by turns.
        since: First position at which `shares` count. A position is an epoch, and the number of a
            global batch in it.
        position: Position after the furthest global batch that any iteration has handed out.
        sizes: Numbers of samples of the parts that this iteration has handed out, oldest first.
            `BatchSplit` removes them.
    """

    whole: Any
    rank: int
    num_ranks: int
    shares: Sequence[int] | None
    since: tuple[int, int] = (0, 0)
    position: tuple[int, int] = (0, 0)
    sizes: deque[int] = field(default_factory=deque)

    def __len__(self) -> int:
        # The first ranks have a part of the last, shorter global batch, see `cut`.
        rest: int = len(self.whole.sampler) % self.whole.batch_size
        return len(self.whole) - (not self.whole.drop_last and 0 < rest <= self.rank)

    @override
    def __iter__(self) -> Iterator[list[int]]:
        epoch = self.whole.sampler.epoch
        with torch.random.fork_rng(devices=()):
            # A sampler that Lightning has wrapped may draw from torch's generator.
            torch.default_generator.manual_seed(self.whole.sampler.seed + epoch)
            batches = list(self.whole)
        self.sizes.clear()
        for number, samples in enumerate(batches):
            shares = self.shares
            if shares is None or (epoch, number) < self.since:
                shares = [1 + (rank + epoch + number) % 2 for rank in range(self.num_ranks)]
            # Never less: user code may iterate, too, and training has fetched these batches.
            self.position = max(self.position, (epoch, number + 1))
            parts = cut(len(samples), tuple(shares))
            begin, size = sum(parts[: self.rank]), parts[self.rank]
            if size > 0:
                self.sizes.append(size)
                yield samples[begin : begin + size]


class BatchSplit(Callback):
    """Splits training batches among ranks by shares; `DearStrategy` describes the option `split`.

    With "auto", in a fit's first batches every rank gets a smaller and a larger part of the global
    batch by turns, and measures each batch without its waits for messages. Then ranks exchange what
    a batch and a sample cost them. The sizes for which the slowest rank needs the least time count
    from the first global batch that no rank has fetched. They are saved in checkpoints, and count
    at once in a resumed fit with as many ranks and the same global batch.

    Args:
        split: Shares, or "auto".
        fusion: Planner of the strategy.

    Raises:
        TypeError: If `split` is neither a list of whole numbers nor a string.
        ValueError: If a share is not positive, a string is unknown, or both `split` and `fusion`
            would measure the first steps.
    """

    def __init__(self, split: Any, fusion: planning.FusionPlanner) -> None:
        words = f"split must be 'auto' or whole numbers > 0, such as [3, 1], got {split!r}."
        is_list = isinstance(split, list | tuple) and {type(one) for one in split} == {int}
        if not is_list and not isinstance(split, str):
            raise TypeError(words)
        if split != "auto" and (not is_list or min(split) < 1):
            raise ValueError(words)
        if split == "auto" and isinstance(fusion, planning.SearchingPlanner):
            raise ValueError(
                f"split='auto' and {option_of(fusion)} would both measure the first steps of a fit."
                " Use split='auto' first, and then split=[...] with the sizes that it prints."
            )
        self._is_auto = split == "auto"
        self._shares: Sequence[int] | None = None if self._is_auto else list(split)
        # For each measured batch: its size, and marks at which work begins and ends by turns. Work
        # ends where the batch ends or waits.
        self._timed: list[tuple[int, list[Any]]] = []

    def loader(self, loader: Any, strategy: Any) -> Any:
        """Returns a copy of a training loader that gives this rank's parts. Collective. Blocks.

        The copy has the same class, data set, workers and options.

        Args:
            loader: Loader as Lightning hands it to the strategy. Not mutated. A loader that is not
                for training is returned unchanged.
            strategy: The trainer's strategy.

        Raises:
            ValueError: On all ranks: if a rank's loader is no ordinary map-style one, if loaders
                or shares differ, or if there are not as many shares as ranks.
        """
        if not strategy.lightning_module.trainer.training:
            return loader
        order, num_ranks = _order_of(loader), strategy.world_size
        facts: Any = order
        if not isinstance(order, str):
            facts = {"split": self._shares, "batch_size": loader.batch_size, "samples": len(order)}
            facts |= {"shuffle": order.shuffle, "seed": order.seed, "drop_last": loader.drop_last}
            # With workers, a resumed epoch is drawn before Lightning tells the sampler its number.
            facts["has_workers"] = loader.num_workers > 0
        said = from_all_ranks(facts)
        for rank, facts in enumerate(said):
            if isinstance(facts, str) or facts != said[0]:
                raise ValueError(
                    f"split= cannot cut the batches of rank {rank}: it has {facts}. Train with a"
                    " DataLoader of a map-style data set, with batch_size= and shuffle=, and give"
                    f" all ranks the same: rank 0 has {said[0]}. Or leave out split=."
                )
        total, shares = loader.batch_size * num_ranks, self._shares or ()
        if self._is_auto and (len(shares), sum(shares)) != (num_ranks, total):
            # Nothing was measured, or with other batches, or with another number of ranks.
            self._shares = None
        elif len(shares) != num_ranks:
            raise ValueError(f"split={shares} must have one share for each of {num_ranks} ranks.")
        whole = data.BatchSampler(order, total, loader.drop_last)
        self._batches = SplitBatches(whole, strategy.global_rank, num_ranks, self._shares)
        # A loader refuses to be assigned these, and a new one needs the arguments of its class.
        own = copy(loader)
        vars(own).update(batch_sampler=self._batches, sampler=order)
        private_names.LOADER_ITERATOR.replace_in(own, None)
        return own

    # --- split="auto" ---------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self._timed.clear()
        if self._shares is None and isinstance(trainer.train_dataloader, list | tuple | dict):
            raise ValueError(
                "split='auto' measures one training loader, and there are several. Use split=[...]."
            )

    @override
    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        instruments = trainer.strategy.pipeline_of().training.instruments
        if self._shares is None and len(self._timed) < NUM_MEASURED:
            sizes = self._batches.sizes
            # A batch that is given again has the size of the one before.
            size = sizes.popleft() if sizes else self._timed[-1][0]
            instruments.marks = [instruments.clock.mark()]
            self._timed.append((size, instruments.marks))
        elif self._shares is None:
            self._decide(instruments.clock)

    @override
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        instruments = trainer.strategy.pipeline_of().training.instruments
        if instruments.marks is not None:
            instruments.marks.append(instruments.clock.mark())
            instruments.marks = None

    def _decide(self, clock: Clock) -> None:
        """Chooses the sizes from what all ranks have measured. Collective. Blocks."""
        own = _cost(self._timed[_NUM_WARM_UP:], clock), self._batches.position
        costs, positions = zip(*from_all_ranks(own), strict=True)
        equal = [self._batches.whole.batch_size // len(costs)] * len(costs)
        sizes, seconds = quickest(costs, equal)
        gain = max(a + b * equal[0] for a, b in costs) / seconds
        # A small gain is noise, and equal sizes have the bits of DDP.
        if gain < _LEAST_GAIN:
            sizes, gain = equal, 1.0
        rank_zero_info(f"split={sizes}: steps compute {gain:.1f} times as fast as with equal sizes")
        self._shares = self._batches.shares = sizes
        self._batches.since = max(positions)

    @override
    def on_train_end(self, *_: Any) -> None:
        if self._shares is None:
            rank_zero_warn(
                f"split='auto' needs more than {NUM_MEASURED} batches to measure. Use split=[...]."
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"sizes": self._shares} if self._is_auto else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._is_auto:
            self._shares = state_dict["sizes"]


def _order_of(loader: Any) -> Any:
    """Returns a sampler of all samples for one rank, in the order in which Lightning gives them.

    Like Lightning's own it depends on the seed and the epoch alone, also where
    `use_distributed_sampler=False` has left another in place. Returns the name of what keeps the
    batches of `loader` from being cut, if anything does.
    """
    if not isinstance(loader, data.DataLoader):
        return type(loader).__name__
    if isinstance(loader.dataset, data.IterableDataset):
        return "an IterableDataset"
    if type(loader.batch_sampler) is not data.BatchSampler:
        return f"batch_sampler={type(loader.batch_sampler).__name__}"
    own: Any = copy(loader.sampler)
    if type(own) is DistributedSamplerWrapper:
        # One that is not torch's may have another order on each rank, in any epoch.
        inner = private_names.WRAPPED_SAMPLER.of(own.dataset)
        if type(inner).__module__ != data.Sampler.__module__:
            return f"sampler={type(inner).__name__}"
    if type(own) in (data.DistributedSampler, DistributedSamplerWrapper):
        own.num_replicas, own.rank = 1, 0
        own.num_samples = own.total_size = len(own.dataset)
        return own
    is_shuffled = type(own) is data.RandomSampler
    if type(own) is data.SequentialSampler or (is_shuffled and not own.replacement):
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        if len(own) == len(loader.dataset):  # type: ignore[arg-type]
            return data.DistributedSampler(loader.dataset, 1, 0, is_shuffled, seed)
    return f"sampler={type(own).__name__}"


def _cost(timed: Sequence[tuple[int, list[Any]]], clock: Clock) -> tuple[float, float]:
    """Returns (a, b): n samples take a + b n seconds.

    If batches of one size alone were measured, the time is taken to be in proportion to the size.
    Blocks until the device has reached the last mark.
    """
    times: dict[int, list[float]] = defaultdict(list)
    for size, marks in timed:
        spans = zip(marks[::2], marks[1::2], strict=False)
        times[size].append(sum(clock.seconds(end) - clock.seconds(start) for start, end in spans))
    # Not those of the last, shorter global batches, which have few measurements.
    common = sorted(times, key=lambda size: len(times[size]))[-2:]
    points = sorted((size, median(times[size])) for size in common)
    (few, short_s), (many, long_s) = [(0, 0.0), *points][-2:]
    sample_s = min(max((long_s - short_s) / (many - few), 0.0), long_s / many)
    return long_s - sample_s * many, sample_s
