"""One block: a fresh trainer fits a fresh module for some steps, timed in steady state.

Steps begin with their first batch. The first ones are left out (recording, plans, connections), and
the end of the last is not waited for, so that all-gathers are in flight at both ends of what is
timed. Nothing is synchronised in between.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy

from lightning_dear.studies import machine
from lightning_dear.studies.competitors import forget_mesh
from lightning_dear.studies.records import RankBlock, Step
from lightning_dear.studies.stamps import StepStamps
from lightning_dear.telemetry.device_work import device_work_cpu_s

_EXPECTED_WARNINGS = (
    ".*isinstance.treespec, LeafSpec.*",
    "You defined a `validation_step` but have no `val_dataloader`.*",
)
"""What Lightning says of every fit here, and no user can change."""

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
        while True:
            yield from self._batches


class _Probe:
    """Reads counters at both ends of the timed steps, and the strategy's figures of each."""

    def __init__(self, length: BlockLength, interface: str, on_step: Callable[[], None]) -> None:
        self._length = length
        self._interface = interface
        self._on_step = on_step
        self._strategy: Strategy | None = None
        self._batches_per_step = 1
        self.cpu: list[machine.CpuTimes] = []
        self.codec_cpu_s: list[float] = []
        self.sent: list[int | None] = []
        self.statistics: list[Any] = []
        self.plan: Any = None

    def watch(self, trainer: Trainer) -> None:
        self._strategy = trainer.strategy
        self._batches_per_step = trainer.accumulate_grad_batches

    def begin_batch(self, batch: int) -> None:
        step, rest = divmod(batch, self._batches_per_step)
        first = self._length.num_warm_up_steps
        last = first + self._length.num_steps
        if rest == 0 and step:
            self._on_step()
        if rest == 0 and step in (first, last):
            self.sent.append(machine.sent_bytes(self._interface))
            self.cpu.append(machine.cpu_times())
            self.codec_cpu_s.append(device_work_cpu_s())
        # Always, as with a GPU waits are timed once somebody asks.
        figures = getattr(self._strategy, "statistics", None)
        if rest == 0 and first < step <= last:
            self.statistics.append(figures)
            self.plan = getattr(self._strategy, "plan", None)


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


def run_block(
    rig: Rig,
    new_trainer: NewTrainer,
    module: LightningModule,
    batches: Sequence[Any],
    length: BlockLength,
    on_step: Callable[[], None] = lambda: None,
) -> tuple[RankBlock, Strategy]:
    """Fit `module` and return what this rank measured. Collective, blocks.

    Args:
        rig: Where this process stands.
        new_trainer: Makes the trainer; `accumulate_grad_batches` batches are a step.
        module: Mutated: trained, and sharded where the strategy does so.
        batches: Given again and again.
        length: How many steps.
        on_step: Called after every step but the last, which only marks an end.

    Returns:
        The figures, and the strategy after the fit.
    """
    probe = _Probe(length, rig.interface, on_step)
    stamps = StepStamps(probe.begin_batch)
    counts_memory = machine.forget_peak_memory()
    with quiet_lightning():
        trainer = new_trainer(profiler=stamps, max_steps=length.max_steps)
        probe.watch(trainer)
        trainer.fit(module, train_dataloaders=Endless(batches))
    steps = steps_of(stamps, length, trainer.accumulate_grad_batches, probe.statistics)
    measured = _measured(rig, probe, tuple(steps), counts_memory)
    forget_mesh(trainer.strategy)
    return measured, trainer.strategy


def _measured(rig: Rig, probe: _Probe, steps: tuple[Step, ...], counts_memory: bool) -> RankBlock:
    before, after = probe.sent
    codec_cpu_s = probe.codec_cpu_s[1] - probe.codec_cpu_s[0]
    wall_s = probe.cpu[1].wall_s - probe.cpu[0].wall_s
    return RankBlock(
        rank=rig.rank,
        steps=steps,
        cpu_s=probe.cpu[1].process_s - probe.cpu[0].process_s,
        wall_s=wall_s,
        machine_use=machine.machine_use(*probe.cpu),
        interface_bytes=None if before is None or after is None else after - before,
        peak_memory_bytes=machine.peak_memory() if counts_memory else None,
        num_buckets=None if probe.plan is None else len(probe.plan.buckets),
        codec_cpu_s=codec_cpu_s,
        codec_use=codec_cpu_s * rig.ranks_on_machine / (wall_s * (os.cpu_count() or 1)),
    )


def steps_of(
    stamps: StepStamps, length: BlockLength, batches_per_step: int, statistics: Sequence[Any]
) -> Iterator[Step]:
    """Yield the timed steps.

    Args:
        stamps: Of all batches of the fit.
        length: How many steps, and how many to leave out.
        batches_per_step: Batches whose gradients accumulate.
        statistics: A `StepStatistics` for each timed step, or None where the strategy has none.
    """
    for number, figures in enumerate(statistics):
        first = (length.num_warm_up_steps + number) * batches_per_step
        last = first + batches_per_step
        yield Step(
            step_s=stamps.begins_s[last] - stamps.begins_s[first],
            forward_s=sum(stamps.forward_s[first:last]),
            backward_s=sum(stamps.backward_s[first:last]),
            exposed_reduce_scatter_s=figures and figures.exposed_reduce_scatter_s,
            exposed_all_gather_s=figures and figures.exposed_all_gather_s,
            wire_bytes=figures and figures.wire_bytes,
        )


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
    names = ("lightning.pytorch", "lightning.fabric")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for message in _EXPECTED_WARNINGS:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
