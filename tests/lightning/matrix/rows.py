"""What a row of the matrix is: a feature that works, or one that is refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from tests.distributed.rank import RANKS_A_HOST
from tests.lightning.matrix.seen import Seen

OPTIMIZERS = ("sgd", "adamw")
"""SGD with momentum, and AdamW; both in two parameter groups."""

WORLD_SIZES = (4,) if RANKS_A_HOST in os.environ else (1, 2, 3)
"""Four ranks where hosts of several are pretended: then all collectives go in two hops."""

SEVERAL, MOST = tuple(size for size in WORLD_SIZES if size > 1), WORLD_SIZES[-1:]
NUM_BATCHES = 6
"""Per rank and epoch, where a row says nothing else."""

Drive = Callable[[Trainer, LightningModule, Any], None]
"""(trainer, module, loader) -> None: runs what the row is about, mostly `trainer.fit`."""


@dataclass(frozen=True)
class Apart:
    """Why a row's numbers are not the reference's bits, and how far they may be from them.

    Attributes:
        reason: In words that a reader of the documentation understands.
        distance: Norm of the difference divided by the norm of the reference, at most.
        world_sizes: Where it holds.
        series: Names of the series (see `Seen`) that it holds for; empty for all.
    """

    reason: str
    distance: float
    world_sizes: tuple[int, ...] = WORLD_SIZES
    series: tuple[str, ...] = ()

    def covers(self, world_size: int, series: str) -> bool:
        """Whether it excuses `series` at `world_size`."""
        return world_size in self.world_sizes and (not self.series or series in self.series)


SUM_ORDER = Apart(
    "at 3 ranks and more a sum depends on its order: ours is by rank, DDP's goes round a ring",
    1e-9,
    MOST,
)
"""Holds for every row. Rows run in float64 at 3 ranks and more, so that rounding stays far below
what a wrong gradient would do (AdamW blows up gradients that are rounding noise: in float32 the
weights would be 1e-3 apart)."""

THREE_RANKS = 1e-2
"""In place of `SUM_ORDER`'s distance where a row fixes its precision."""

NORM_ORDER = Apart(
    "the norm is summed over shards, not over whole tensors: another order of summation", 2e-6
)


def fit(trainer: Trainer, module: LightningModule, loader: Any) -> None:
    """Trains without validation."""
    trainer.fit(module, loader)


def fit_and_validate(trainer: Trainer, module: LightningModule, loader: Any) -> None:
    """Trains with the training data as validation data."""
    trainer.fit(module, loader, loader)


def no_callbacks(folder: Path) -> Sequence[Callback]:
    """None."""
    return ()


def no_plugins() -> Sequence[Any]:
    """None."""
    return ()


def nothing(seen: Seen) -> None:
    """Checks nothing."""


@dataclass(frozen=True)
class Feature:
    """A feature that gives under ours what it gives under the reference, in every step.

    Attributes:
        name: As a user would call it; unique.
        section: Heading in the documentation.
        net: Optimizer's name -> a new module.
        data: Name of the model (see `tests.training.models`) whose data the loader serves.
        trainer: The trainer's options.
        callbacks: Folder -> new callbacks of the row.
        plugins: New plug-ins for the trainer.
        drive: What is run.
        num_batches: Per rank and epoch.
        num_steps: Optimizer steps that the fit must take; None for one per batch.
        strategy: Options of our strategy.
        reference: World size -> what ours is compared with; "ddp", "ddp, unused" (with
            `find_unused_parameters`), or "single" (one process with all ranks' samples).
        reference_net: The reference's module, if it must be another.
        apart: Exceptions from "equal by the bit", beside `SUM_ORDER`.
        check: Raises unless the run showed what the row is about.
        trains: Whether weights must have changed from the first step to the last.
        optimizers: Names of optimizers.
        world_sizes: Where it runs.
        needs: False where the installed Lightning or torch lacks the feature.
        remark: For the documentation: what a user should know.
    """

    name: str
    section: str
    net: Callable[[str], LightningModule]
    data: str = "mlp"
    trainer: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Callable[[Path], Sequence[Callback]] = no_callbacks
    plugins: Callable[[], Sequence[Any]] = no_plugins
    drive: Drive = fit
    num_batches: int = NUM_BATCHES
    num_steps: int | None = None
    strategy: Mapping[str, Any] = field(default_factory=dict)
    reference: str = "ddp"
    reference_net: Callable[[str], LightningModule] | None = None
    apart: tuple[Apart, ...] = ()
    check: Callable[[Seen], None] = nothing
    trains: bool = True
    optimizers: tuple[str, ...] = OPTIMIZERS
    world_sizes: tuple[int, ...] = WORLD_SIZES
    needs: bool = True
    remark: str = ""

    def options(self, world_size: int) -> dict[str, Any]:
        """The trainer's options; in float64 at many ranks, unless the row is about precision."""
        is_plain = self.section != "Precision"
        return {
            **({"precision": "64-true"} if world_size in MOST and is_plain else {}),
            **self.trainer,
        }

    def distance(self, world_size: int, series: str) -> float:
        """How far `series` may be from the reference's; 0 for equal by the bit."""
        reasons = [one for one in (SUM_ORDER, *self.apart) if one.covers(world_size, series)]
        return max((one.distance for one in reasons), default=0.0)


@dataclass(frozen=True)
class Refused:
    """A feature that every rank refuses.

    Attributes:
        name: As a user would call it; unique.
        section: Heading in the documentation.
        run: Runs on every rank; must raise.
        message: Part of what is raised, on every rank alike.
        why: For the documentation, a short clause.
        instead: For the documentation: what to do.
        error: Name of the exception's type.
        needs: False where the installed Lightning or torch lacks what is refused.
    """

    name: str
    section: str
    run: Callable[[], None]
    message: str
    why: str
    instead: str
    error: str = "ValueError"
    needs: bool = True


@dataclass(frozen=True)
class Different:
    """What is not as under DDP, by design.

    Attributes:
        name: What a user might do; unique.
        run: Runs on every rank of two; raises unless it is as `what` says.
        what: What happens.
        instead: What to do.
    """

    name: str
    run: Callable[[], None]
    what: str
    instead: str


@dataclass(frozen=True)
class Uncaught:
    """What no test and no guard can see; for the documentation.

    Attributes:
        name: What a user might do; unique.
        what: What happens then.
        instead: What to do.
    """

    name: str
    what: str
    instead: str


def seeded(build: Callable[[str], LightningModule]) -> Callable[[str], LightningModule]:
    """`build` with the same random numbers at every call."""

    def seeded_build(optimizer: str) -> LightningModule:
        torch.manual_seed(1)
        return build(optimizer)

    return seeded_build
