"""One block: a fresh trainer fits a fresh module for some steps, timed in steady state.

A step begins with its first batch. The first steps are not timed, because they record, plan and
connect. Timing ends when the step after the last timed one begins, so that all-gathers are in
flight both at the beginning and at the end of the timed steps. Nothing is synchronized in between.
"""

import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule, Trainer, profilers, strategies
from numpy.typing import NDArray
from typing_extensions import override

from lightning_dear.studies import competitors, files, machine

Floats = NDArray[np.float64]

WAITS = ("exposed_reduce_scatter_s", "exposed_all_gather_s")
FIGURES = ("step_s", "forward_s", "backward_s", *WAITS, "wire_bytes")
"""Figures of each step of a rank, in this order: seconds from the beginning of its first batch to
that of the next step; seconds in `training_step`, waits for parameters included; seconds in
backward, waits for buckets included; seconds of waiting for gradients; seconds of waiting for
parameters; bytes of payload that it sent. The last three are nan if the strategy has no
`statistics`."""

STEP = "run_training_batch"
"""Lightning's profiler action for one batch: forward, backward and, if due, the optimizer step."""

_EXPECTED_WARNINGS = (
    ".*isinstance.treespec, LeafSpec.*",
    "You defined a `validation_step` but have no `val_dataloader`.*",
    ".*does not have many workers.*",
    "Using `DistributedSampler` with the dataloaders.*",
)
"""Warnings that Lightning prints for every fit and test here, and that the user cannot avoid."""


@dataclass(frozen=True)
class BlockLength:
    """Number of optimizer steps of a block.

    Attributes:
        num_warm_up_steps: Number of first steps that are not timed. At least 3, because the first
            one is recorded and the second one is the first with a plan.
        num_steps: Number of timed steps, a multiple of `period`.
        period: Steps after which the same work comes again: those of a round of local steps.
    """

    num_warm_up_steps: int
    num_steps: int
    period: int = 1

    def __post_init__(self) -> None:
        """Raise ValueError if no timed step would be in steady state."""
        if self.num_warm_up_steps < 3:
            raise ValueError(f"warm_up_steps={self.num_warm_up_steps} is too few. Set 3 or more.")
        if self.num_steps < 1:
            raise ValueError(f"steps={self.num_steps} is not valid. Choose 1 or more.")

    @property
    def max_steps(self) -> int:
        """Number of steps to fit: one more, which only marks the end of the last timed step."""
        return self.num_warm_up_steps + self.num_steps + 1

    def of_rounds(self, period: int) -> "BlockLength":
        """Return a length of whole rounds of `period` steps, at least as long as this one."""
        warm_up, steps = self.num_warm_up_steps, self.num_steps
        return BlockLength(-(-warm_up // period) * period, -(-steps // period) * period, period)


@dataclass(frozen=True)
class RankBlock:
    """Measurements of one rank in a block.

    Attributes:
        rank: The rank.
        steps: Figures of the timed steps, [steps, `FIGURES`].
        load: Use of the machine during the timed steps. A value of None means unknown. host_bytes:
            bytes that leave a host in a step, by its interface's counter, headers included.
            peak_memory_bytes: most resident memory of the rank. cpu_per_rank: CPU seconds of the
            rank per second. machine_use: share of the machine's cores that was busy, 0 to 1.
            others_use: machine_use without encoding and decoding. codec_s: CPU seconds of encoding
            and decoding in a step. num_buckets: number of buckets in the strategy's plan.
        period: See `BlockLength`.
    """

    rank: int
    steps: Floats
    load: files.Line
    period: int = 1


@dataclass(frozen=True)
class Rig:
    """A rank and its machine, the same in every block.

    Attributes:
        rank: Rank of this process.
        world_size: Number of ranks.
        interface: Network interface whose sent bytes are counted. Empty means that none is.
        ranks_on_machine: Number of ranks that share this machine, on all of its emulated hosts.
    """

    rank: int
    world_size: int
    interface: str
    ranks_on_machine: int = 1


class StepProbe(profilers.Profiler):
    """Times batches, forwards and backwards, for `Trainer(profiler=)`.

    Also reads the machine's counters before and after the timed steps, and the strategy's
    `statistics` of each step. It is a profiler and no callback because `strategy="dear"` gathers
    all parameters before it calls an unknown callback, and then nothing would overlap.

    Args:
        length: Number of warm-up steps and of timed steps.
        interface: Network interface whose sent bytes are counted. Empty means none.
        on_step: Called after every step except the last one, which only marks an end.

    Attributes:
        strategy: Strategy whose `statistics` are read; to be set before the fit.
        batches_per_step: Number of batches whose gradients accumulate; to be set before the fit.
        begins_s: `time.perf_counter` at the beginning of each batch.
        forward_s: Seconds of each batch's `training_step`.
        backward_s: Seconds of each batch's backward.
        statistics: `StepStatistics` of each timed step; None if the strategy has none.
    """

    def __init__(
        self, length: BlockLength, interface: str = "", on_step: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self._length = length
        self._interface = interface
        self._on_step = on_step
        self._phase_began_s = 0.0
        self._counts: list[machine.Counters] = []
        self._num_buckets = math.nan
        self.strategy: strategies.Strategy | None = None
        self.batches_per_step = 1
        self.begins_s: list[float] = []
        self.forward_s: list[float] = []
        self.backward_s: list[float] = []
        self.statistics: list[Any] = []

    @override
    def start(self, action_name: str) -> None:
        if action_name == STEP:
            step, rest = divmod(len(self.begins_s), self.batches_per_step)
            if rest == 0:
                self._begin_step(step)
            self.begins_s.append(time.perf_counter())
        elif self._phase(action_name) is not None:
            self._phase_began_s = time.perf_counter()

    @override
    def stop(self, action_name: str) -> None:
        if (phase := self._phase(action_name)) is not None:
            phase.append(time.perf_counter() - self._phase_began_s)

    def _phase(self, action_name: str) -> list[float] | None:
        owner, _, hook = action_name.rpartition(".")
        phases = {"training_step": self.forward_s, "backward": self.backward_s}
        return phases.get(hook) if owner.startswith("[Strategy]") else None

    def _begin_step(self, step: int) -> None:
        first, last = self._length.num_warm_up_steps, self._length.max_steps - 1
        if step:
            self._on_step()
        if step in (first, last):
            self._counts.append(machine.counters(self._interface))
        # Read in warm-up steps too: on a GPU the strategy times waits only after a first read.
        figures = getattr(self.strategy, "statistics", None)
        if first < step <= last:
            self.statistics.append(figures)
            plan = getattr(self.strategy, "plan", None)
            self._num_buckets = math.nan if plan is None else len(plan.buckets)

    def steps(self) -> Floats:
        """Return the figures of the timed steps, [steps, `FIGURES`], when these have ended."""
        first = self._length.num_warm_up_steps
        last = first + len(self.statistics)
        begins_s = np.array(self.begins_s[:: self.batches_per_step])
        shape, phases = (-1, self.batches_per_step), (self.forward_s, self.backward_s)
        phases_s = [np.reshape(of_batches, shape).sum(1)[first:last] for of_batches in phases]
        waits = [[getattr(one, name, math.nan) for name in FIGURES[3:]] for one in self.statistics]
        return np.column_stack([np.diff(begins_s[first : last + 1]), *phases_s, waits])

    def measured(self, rig: Rig, peak_memory_bytes: float) -> RankBlock:
        """Return this rank's measurements, when the block has ended."""
        before, after = self._counts
        spent, num_steps = after.since(before), self._length.num_steps
        # Assumes that all ranks of the machine encode for as long as this one.
        codec_use = spent.codec_s * rig.ranks_on_machine / (spent.wall_s * (os.cpu_count() or 1))
        load = {
            "host_bytes": spent.sent_bytes / num_steps,
            "peak_memory_bytes": peak_memory_bytes,
            "cpu_per_rank": spent.process_s / spent.wall_s,
            "machine_use": spent.machine_use,
            "others_use": spent.machine_use - codec_use,
            "codec_s": spent.codec_s / num_steps,
            "num_buckets": self._num_buckets,
        }
        known = {name: None if math.isnan(value) else value for name, value in load.items()}
        return RankBlock(rig.rank, self.steps(), known, self._length.period)


def run_block(
    rig: Rig,
    new_trainer: Callable[..., Trainer],
    module: LightningModule,
    batches: Sequence[Any],
    length: BlockLength,
    on_step: Callable[[], None] = lambda: None,
) -> RankBlock:
    """Fit `module` and return this rank's measurements. Collective. Blocks.

    Args:
        rig: This process's rank and machine.
        new_trainer: Makes the trainer from `profiler` and `max_steps`, without logging, saving or
            validation; a step has `accumulate_grad_batches` batches.
        module: Module to train; it is mutated, and sharded if the strategy does so.
        batches: Batches, at least one. They are repeated, so that loading data takes no time in a
            step.
        length: Number of warm-up steps and of timed steps.
        on_step: Called after every step except the last one, which only marks an end.
    """
    if not batches:
        raise ValueError("The training loader gave no batch. Use more data or smaller batches.")
    probe = StepProbe(length, rig.interface, on_step)
    counts_memory = machine.forget_peak_memory()
    with quiet_lightning():
        trainer = new_trainer(profiler=probe, max_steps=length.max_steps)
        probe.strategy = trainer.strategy
        probe.batches_per_step = trainer.accumulate_grad_batches
        trainer.fit(module, train_dataloaders=cycle(batches))
    competitors.forget_mesh(trainer.strategy)
    return probe.measured(rig, machine.peak_memory() if counts_memory else math.nan)


def interface_of(num_nodes: int) -> str:
    """Return the network interface through which ranks send; empty if unknown.

    It is the loopback if all ranks share a host, otherwise the one that the environment names for
    gloo or NCCL.
    """
    if num_nodes == 1:
        return "lo"
    return os.environ.get("GLOO_SOCKET_IFNAME", os.environ.get("NCCL_SOCKET_IFNAME", ""))


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Within, suppress Lightning's log messages, and its warnings that the user cannot avoid."""
    logging.disable(logging.INFO)
    try:
        with warnings.catch_warnings():
            for message in _EXPECTED_WARNINGS:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        logging.disable(logging.NOTSET)
