"""One block: a fresh trainer fits a fresh module for some steps, timed in steady state.

Steps begin with their first batch. The first ones are left out (recording, plans, connections), and
the end of the last is not waited for, so that all-gathers are in flight at both ends of what is
timed. Nothing is synchronised in between.
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
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from numpy.typing import NDArray
from typing_extensions import override

from lightning_dear.studies import machine
from lightning_dear.studies.competitors import forget_mesh
from lightning_dear.studies.files import Line

Floats = NDArray[np.float64]

FIGURES = (
    *("step_s", "forward_s", "backward_s"),
    *("exposed_reduce_scatter_s", "exposed_all_gather_s", "wire_bytes"),
)
"""What is known of each step of a rank: seconds from the beginning of its first batch to that of
the next step's; in `training_step`, waits for parameters included; in backward, waits for buckets
included; waited for gradients; waited for parameters; and the payload that it sent. The last three
are nan under strategies that do not tell."""

STEP = "run_training_batch"
"""What Lightning calls one batch's forward, backward and optimizer step."""

_EXPECTED_WARNINGS = (
    ".*isinstance.treespec, LeafSpec.*",
    "You defined a `validation_step` but have no `val_dataloader`.*",
    ".*does not have many workers.*",
    "Using `DistributedSampler` with the dataloaders.*",
)
"""What Lightning says of every fit and test here, and no user can change."""

NewTrainer = Callable[..., Trainer]
"""Takes `profiler` and `max_steps`; returns a trainer that logs, saves and validates nothing."""


@dataclass(frozen=True)
class BlockLength:
    """How many optimizer steps a block has.

    Attributes:
        num_warm_up_steps: Left out; at least 3, since the first two are recorded and planned.
        num_steps: Timed.
    """

    num_warm_up_steps: int
    num_steps: int

    def __post_init__(self) -> None:
        """Raises ValueError for lengths that leave nothing in steady state."""
        if self.num_warm_up_steps < 3:
            raise ValueError(f"warm_up_steps must be at least 3, got {self.num_warm_up_steps}.")
        if self.num_steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.num_steps}.")

    @property
    def max_steps(self) -> int:
        """Steps to fit: one more, which only marks the end of the one before."""
        return self.num_warm_up_steps + self.num_steps + 1


class Endless:
    """Gives the same batches again and again: loading data is no part of a step.

    Args:
        batches: At least one.
    """

    def __init__(self, batches: Sequence[Any]) -> None:
        if not batches:
            raise ValueError("The data module's training loader gave no batch.")
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return cycle(self._batches)


@dataclass(frozen=True)
class RankBlock:
    """A block as one rank saw it.

    Attributes:
        rank: Which.
        steps: [steps, `FIGURES`], without the warm-up.
        load: What they took of the machine, None if unknown. host_bytes: that leave a host in a
            step, by its interface's counter, headers included. peak_memory_bytes: most resident
            memory of the rank. cpu_per_rank: CPU seconds of the rank per second. machine_use: share
            of the machine's cores that was busy, 0 to 1. others_use: the same without encoding and
            decoding. codec_s: CPU seconds of these, per step. num_buckets: of the strategy's plan.
    """

    rank: int
    steps: Floats
    load: Line


@dataclass(frozen=True)
class Rig:
    """One rank's place among the ranks, the same in every block.

    Attributes:
        rank: This process's.
        world_size: All ranks.
        interface: What carries the bytes that leave the host; empty where nobody counts them.
        ranks_on_machine: Ranks that share a machine, which may have several emulated hosts.
    """

    rank: int
    world_size: int
    interface: str
    ranks_on_machine: int = 1


class StepProbe(Profiler):
    """Notes when batches, forwards and backwards begin and end, for `Trainer(profiler=)`.

    Also reads counters at both ends of the timed steps, and the strategy's figures of each. A
    profiler and no callback: before a callback that it does not know, `strategy="dear"` completes
    all parameters, and the overlap to be measured would be gone.

    Args:
        length: How many steps, and how many to leave out.
        interface: Whose bytes are counted.
        on_step: Called after every step but the last, which only marks an end.

    Attributes:
        strategy: To be set before the fit: whose figures are read.
        batches_per_step: To be set before the fit: batches whose gradients accumulate.
        begins_s: Beginning of each batch, `time.perf_counter` seconds.
        forward_s: Seconds that each batch's `training_step` took.
        backward_s: Seconds that each batch's backward took.
        statistics: A `StepStatistics` for each timed step, or None where the strategy has none.
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
        self.strategy: Strategy | None = None
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
        phase = self._phase(action_name)
        if phase is not None:
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
        # Always, as with a GPU waits are timed once somebody asks.
        figures = getattr(self.strategy, "statistics", None)
        if first < step <= last:
            self.statistics.append(figures)
            plan = getattr(self.strategy, "plan", None)
            self._num_buckets = math.nan if plan is None else len(plan.buckets)

    def steps(self) -> Floats:
        """Return the timed steps, [steps, `FIGURES`], once they have ended."""
        first = self._length.num_warm_up_steps
        last = first + len(self.statistics)
        begins_s = np.array(self.begins_s[:: self.batches_per_step])
        phases_s = [
            np.reshape(of_batches, (-1, self.batches_per_step)).sum(1)[first:last]
            for of_batches in (self.forward_s, self.backward_s)
        ]
        waits = [[getattr(one, name, math.nan) for name in FIGURES[3:]] for one in self.statistics]
        return np.column_stack([np.diff(begins_s[first : last + 1]), *phases_s, waits])

    def measured(self, rig: Rig, peak_memory_bytes: float) -> RankBlock:
        """Return the block of this rank, once it has ended."""
        before, after = self._counts
        spent, num_steps = after.since(before), self._length.num_steps
        # All its ranks are taken to be alike.
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
        return RankBlock(rig.rank, self.steps(), known)


def run_block(
    rig: Rig,
    new_trainer: NewTrainer,
    module: LightningModule,
    batches: Sequence[Any],
    length: BlockLength,
    on_step: Callable[[], None] = lambda: None,
) -> RankBlock:
    """Fit `module` and return what this rank measured. Collective, blocks.

    Args:
        rig: Where this process stands.
        new_trainer: Makes the trainer; `accumulate_grad_batches` batches are a step.
        module: Mutated: trained, and sharded where the strategy does so.
        batches: Given again and again.
        length: How many steps.
        on_step: Called after every step but the last, which only marks an end.
    """
    probe = StepProbe(length, rig.interface, on_step)
    counts_memory = machine.forget_peak_memory()
    with quiet_lightning():
        trainer = new_trainer(profiler=probe, max_steps=length.max_steps)
        probe.strategy = trainer.strategy
        probe.batches_per_step = trainer.accumulate_grad_batches
        trainer.fit(module, train_dataloaders=Endless(batches))
    measured = probe.measured(rig, machine.peak_memory() if counts_memory else math.nan)
    forget_mesh(trainer.strategy)
    return measured


def interface_of(num_nodes: int) -> str:
    """Return the interface that carries what ranks send each other, empty if unknown.

    The loopback if all ranks share a host; else the one that gloo and NCCL were told to use.
    """
    if num_nodes == 1:
        return "lo"
    return os.environ.get("GLOO_SOCKET_IFNAME", os.environ.get("NCCL_SOCKET_IFNAME", ""))


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Keep Lightning's notices of every fit off the screen; its warnings are shown once."""
    logging.disable(logging.INFO)
    try:
        with warnings.catch_warnings():
            for message in _EXPECTED_WARNINGS:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        logging.disable(logging.NOTSET)
