"""Cuts each global batch among ranks, by shares that are given or found from the ranks' speeds.

A global batch is what all ranks train on at once: `batch_size` times the number of ranks.
"""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median
from typing import Any

import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils import data
from typing_extensions import override

from lightning_dear import private_names
from lightning_dear.callbacks.fusion_tuner import option_of
from lightning_dear.collectives.store import from_all_ranks
from lightning_dear.planning import FusionPlanner, SearchingPlanner
from lightning_dear.telemetry.clock import Clock

NUM_MEASURED = 20
"""Number of batches in which split="auto" measures. The first ones, which warm up, do not count."""

_NUM_WARM_UP, _LEAST_GAIN = 4, 1.05

Marks = list[tuple[Any, Any]]
"""Pairs of marks of a clock, see `Instruments.computing`."""


def cut(num_samples: int, shares: Sequence[int]) -> list[int]:
    """Returns how many of `num_samples` each rank gets: whole numbers with this sum.

    With at least as many samples as ranks every rank gets one or more. With fewer the first ranks
    get one each, whatever the shares are, so that the number of a rank's batches does not depend on
    the shares.
    """
    if num_samples < len(shares):
        return [int(rank < num_samples) for rank in range(len(shares))]
    ends = [num_samples * share // sum(shares) for share in accumulate(shares)]
    sizes = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    while 0 in sizes:
        sizes[sizes.index(max(sizes))] -= 1
        sizes[sizes.index(0)] += 1
    return sizes


def quickest(costs: Sequence[tuple[float, float]], sizes: list[int]) -> tuple[list[int], float]:
    """Returns the sizes, with the same sum, for which the slowest rank needs the least time.

    Among such sizes those are returned that need the fewest moves of a sample.

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


@dataclass(eq=False)
class SplitBatches(data.Sampler[list[int]]):
    """Gives this rank's part of every global batch: a batch sampler.

    All ranks have the same order of samples and cut it at the same places. A rank that gets no
    sample of the last, shorter global batch has one batch less there.

    Attributes:
        sampler: Gives all samples in order. Lightning looks for this name, to call `set_epoch`.
        total: Number of samples in a full global batch.
        drop_last: Whether a last, shorter global batch is left out.
        rank: This rank.
        num_ranks: Number of ranks.
        shares: Shares of the ranks; to be assigned to together with `since`. None means that speeds
            are measured: every rank gets a smaller and a larger part by turns.
        since: First position at which `shares` count. A position is how many iterations over this
            object have begun, and the number of the global batch in the last one.
        position: Position of the global batch that is handed out next.
        sizes: Numbers of samples of the parts that this iteration has handed out, oldest first. Who
            measures removes them. 0 means that the global batch was not full.
    """

    sampler: "data.DistributedSampler[Any]"
    total: int
    drop_last: bool
    rank: int
    num_ranks: int
    shares: Sequence[int] | None
    since: tuple[int, int] = (0, 0)
    position: tuple[int, int] = (0, 0)
    sizes: deque[int] = field(default_factory=deque)

    def __len__(self) -> int:
        full, rest = divmod(len(self.sampler), self.total)
        return full + (not self.drop_last and self._cut(rest, self.position)[self.rank] > 0)

    @override
    def __iter__(self) -> Iterator[list[int]]:
        # Counted before the first batch is asked for. With workers that is at once.
        self.position, self.sizes = (self.position[0] + 1, 0), deque()
        return self._parts(self.position[0])

    def _parts(self, iteration: int) -> Iterator[list[int]]:
        with torch.random.fork_rng(devices=()):
            # A sampler that Lightning has wrapped may draw from torch's generator.
            torch.default_generator.manual_seed(self.sampler.seed + self.sampler.epoch)
            order = list(self.sampler)
        for number, start in enumerate(range(0, len(order), self.total)):
            samples = order[start : start + self.total]
            if self.drop_last and len(samples) < self.total:
                return
            sizes = self._cut(len(samples), (iteration, number))
            self.position = iteration, number + 1
            if size := sizes[self.rank]:
                begin = sum(sizes[: self.rank])
                self.sizes.append(size if len(samples) == self.total else 0)
                yield samples[begin : begin + size]

    def _cut(self, num_samples: int, position: tuple[int, int]) -> list[int]:
        shares = self.shares
        if shares is None or position < self.since:
            shares = [1 + (rank + sum(position)) % 2 for rank in range(self.num_ranks)]
        return cut(num_samples, shares)


class BatchSplit(Callback):
    """Splits training batches among ranks by shares; `DearStrategy` describes the option `split`.

    With "auto", in a fit's first batches every rank gets a smaller and a larger part of the global
    batch by turns, and measures forward and backward without their waits for messages. Then ranks
    exchange what a batch and a sample cost them. The sizes for which the slowest rank needs the
    least time count from the first global batch that no worker has fetched. They are saved in
    checkpoints, and count at once in a resumed fit with as many ranks and the same global batch.

    Args:
        split: Shares, or "auto".
        fusion: Planner of the strategy.

    Raises:
        TypeError: If `split` is neither a list of whole numbers nor a string.
        ValueError: If a share is not positive, a string is unknown, or both `split` and `fusion`
            would measure the first steps.
    """

    def __init__(self, split: Any, fusion: FusionPlanner) -> None:
        words = f"split must be 'auto' or whole numbers > 0, such as [3, 1], got {split!r}."
        is_list = isinstance(split, list | tuple) and {type(one) for one in split} == {int}
        if not is_list and not isinstance(split, str):
            raise TypeError(words)
        if split != "auto" and (not is_list or min(split) < 1):
            raise ValueError(words)
        if split == "auto" and isinstance(fusion, SearchingPlanner):
            raise ValueError(
                f"split='auto' and {option_of(fusion)} would both measure the first steps of a fit."
                " Use split='auto' first, and then split=[...] with the sizes that it prints."
            )
        self._is_auto = split == "auto"
        self._shares: Sequence[int] | None = None if self._is_auto else list(split)
        self._batches: SplitBatches | None = None
        self._timed: list[tuple[int, Marks]] = []

    def loader(self, loader: Any, strategy: Any) -> Any:
        """Returns a copy of a training loader that gives this rank's parts. Collective. Blocks.

        The copy has the same class, data set, workers and options.

        Args:
            loader: Loader as Lightning hands it to the strategy. Not mutated. Another than for
                training is returned as it is.
            strategy: The trainer's strategy.

        Raises:
            ValueError: On all ranks: if a rank's loader is no ordinary map-style one, if loaders
                differ, if there are not as many shares as ranks, or fewer samples than ranks.
        """
        if not strategy.lightning_module.trainer.training:
            return loader
        facts: dict[str, Any] = {"split": self._shares, "refused": _refused(loader)}
        if not facts["refused"]:
            order = _order_of(loader)
            facts |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
            facts |= {"samples": len(order), "shuffle": order.shuffle, "seed": order.seed}
            # A loader begins more iterations over its sampler if it has workers.
            facts["has_workers"] = loader.num_workers > 0
        self._check(from_all_ranks(facts))
        num_ranks, total = strategy.world_size, loader.batch_size * strategy.world_size
        shares = self._shares or ()
        # Sizes of a checkpoint of other batches, or of another number of ranks.
        if self._is_auto and (len(shares), sum(shares)) != (num_ranks, total):
            self._shares = None
        how = loader.drop_last, strategy.global_rank, num_ranks, self._shares
        self._batches = SplitBatches(order, total, *how)
        # A loader refuses to be assigned these, and a new one needs the arguments of its class.
        own = copy(loader)
        vars(own).update(batch_sampler=self._batches, sampler=order)
        private_names.LOADER_ITERATOR.replace_in(own, None)
        return own

    def _check(self, said: Sequence[dict[str, Any]]) -> None:
        for rank, facts in enumerate(said):
            if facts["refused"]:
                raise ValueError(
                    f"split= cannot cut the batches of rank {rank}: it has {facts['refused']}."
                    " Train with a DataLoader of a map-style data set, with batch_size= and"
                    " shuffle=, or leave out split=."
                )
            if facts != said[0]:
                raise ValueError(
                    f"split= cannot cut the same batches on all ranks: rank 0 has {said[0]}, rank"
                    f" {rank} has {facts}. Give all ranks the same."
                )
        shares, num_samples = self._shares, said[0]["samples"]
        if shares is not None and len(shares) != len(said) and not self._is_auto:
            raise ValueError(f"split={shares} must have one share for each of {len(said)} ranks.")
        if num_samples < len(said):
            raise ValueError(f"split= cannot cut {num_samples} samples among {len(said)} ranks.")

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
        if self._shares is not None:
            return
        assert self._batches is not None
        instruments = trainer.strategy.pipeline_of().training.instruments
        if len(self._timed) < NUM_MEASURED:
            # A batch that is given again has no entry.
            size = self._batches.sizes.popleft() if self._batches.sizes else 0
            instruments.computing = []
            self._timed.append((size, instruments.computing))
            return
        instruments.computing = None
        self._decide(self._batches, instruments.clock)

    def _decide(self, batches: SplitBatches, clock: Clock) -> None:
        """Chooses the sizes from what all ranks have measured. Collective. Blocks."""
        said = from_all_ranks((_cost(self._timed[_NUM_WARM_UP:], clock), batches.position))
        costs = [cost for cost, _ in said if cost is not None]
        equal = [batches.total // len(said)] * len(said)
        sizes, gain = equal, 1.0
        if len(costs) == len(said):
            sizes, seconds = quickest(costs, equal)
            gain = max(a + b * equal[0] for a, b in costs) / seconds
        each = " and ".join(map(str, sizes))
        words = f"{each} samples; a step's computing {gain:.1f} times faster"
        # A small gain is noise, and equal sizes have the bits of DDP.
        if gain < _LEAST_GAIN:
            sizes, words = equal, "equal sizes; others would not make a step's computing faster"
        rank_zero_info(f"split: {words}")
        self._shares = batches.shares = sizes
        batches.since = max(position for _, position in said)

    @override
    def on_train_end(self, *_: Any) -> None:
        if self._shares is None:
            rank_zero_warn(
                f"split='auto' needs more than {NUM_MEASURED} batches to measure. Use split=[...]"
                " for trainings as short as this."
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"sizes": self._shares} if self._is_auto else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._is_auto:
            self._shares = state_dict["sizes"]


def _refused(loader: Any) -> str:
    """Returns the name of what keeps the batches of `loader` from being cut. Empty if nothing."""
    if not isinstance(loader, data.DataLoader):
        return type(loader).__name__
    if isinstance(loader.dataset, data.IterableDataset):
        return "an IterableDataset"
    if type(loader.batch_sampler) is not data.BatchSampler:
        return f"batch_sampler={type(loader.batch_sampler).__name__}"
    own: Any = loader.sampler
    if type(own) in (data.RandomSampler, data.SequentialSampler):
        num_samples = len(loader.dataset)  # type: ignore[arg-type]
        has_all = len(own) == num_samples and not getattr(own, "replacement", False)
    else:
        has_all = type(own) in (data.DistributedSampler, DistributedSamplerWrapper)
    return "" if has_all else f"sampler={type(own).__name__}"


def _order_of(loader: Any) -> "data.DistributedSampler[Any]":
    """Returns a sampler of all samples for one rank, in the order in which Lightning gives them.

    Like Lightning's own it depends on the seed and the epoch alone, also where
    `use_distributed_sampler=False` has left another in place.
    """
    order, seed = copy(loader.sampler), int(os.environ.get("PL_GLOBAL_SEED", 0))
    if not isinstance(order, data.DistributedSampler):
        is_shuffled = isinstance(order, data.RandomSampler)
        return data.DistributedSampler(loader.dataset, 1, 0, shuffle=is_shuffled, seed=seed)
    order.num_replicas, order.rank = 1, 0
    order.num_samples = order.total_size = len(order.dataset)  # type: ignore[arg-type]
    return order


def _cost(timed: Sequence[tuple[int, Marks]], clock: Clock) -> tuple[float, float] | None:
    """Returns (a, b): n samples take a + b n seconds. None means that one size alone was measured.

    Blocks until the device has reached the last mark.
    """
    times: dict[int, list[float]] = {}
    for size, marks in timed:
        seconds = sum(clock.seconds(end) - clock.seconds(start) for start, end in marks)
        times.setdefault(size, []).append(seconds)
    # Parts of global batches that were not full, and batches that were given again.
    times.pop(0, None)
    if len(times) < 2:
        return None
    (few, short_s), (many, long_s) = sorted((size, median(each)) for size, each in times.items())
    start_s = min(max((short_s * many - long_s * few) / (many - few), 0.0), long_s)
    return start_s, (long_s - start_s) / many
