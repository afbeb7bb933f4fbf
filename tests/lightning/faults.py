"""A training run with one fault in it: which rank, in which step, in which phase, of which kind."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_dear import DearStrategy
from lightning_dear.collectives.gloo import PairwiseCollectives
from lightning_dear.planning import ThresholdFusion
from tests.lightning.fitting import WeightRecorder, collectives_kind, new_trainer
from tests.lightning.nets import Net, copies, data
from tests.training.models import batch

NUM_STEPS = 6
SAVED_EVERY = 2
TIMEOUT = timedelta(seconds=5)
KINDS = ("kill", "raise", "hang", "collective")
PHASES = ("forward", "backward", "step", "gathers", "validation", "saving")
MESSAGE = "the user's own mistake"


@dataclass(frozen=True)
class Fault:
    """Rank `rank` does `kind` in the `step`-th step (from 0), in `phase`."""

    kind: str
    phase: str
    rank: int
    step: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.phase}-rank{self.rank}-step{self.step}"

    def strike(self) -> None:
        """Does it, to the process that calls."""
        print(f"striking: {self}", flush=True)
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "raise":
            raise ZeroDivisionError(MESSAGE)
        elif self.kind == "hang":
            while True:
                with suppress(BaseException):
                    time.sleep(60)
        elif self.kind == "pause":
            time.sleep(60)
        elif self.kind == "asked":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            dist.barrier()


def random_faults(count: int, seed: int, kind: str = "kill", world_size: int = 3) -> list[Fault]:
    """`count` different faults: every phase in turn, ranks and steps drawn."""
    draw = random.Random(seed)
    faults: dict[Fault, None] = {}
    while len(faults) < count:
        phase = PHASES[len(faults) % len(PHASES)]
        # The file that is written after the fourth step takes the place of the second step's.
        steps = (2, 4) if phase == "saving" else (1, 2, 3, 4, 5)
        faults[Fault(kind, phase, draw.randrange(world_size), draw.choice(steps))] = None
    return list(faults)


class FaultyNet(Net):
    """Trains on samples chosen by step, so that a resumed run sees the same ones."""

    def __init__(self, fault: Fault | None = None) -> None:
        super().__init__("gpt", "adamw")
        self.fault = fault

    def strikes_in(self, phase: str) -> bool:
        """Whether this is the rank, the step and the phase."""
        fault = self.fault
        return fault is not None and (
            phase,
            self.trainer.global_rank,
            self.trainer.global_step,
        ) == (
            fault.phase,
            fault.rank,
            fault.step,
        )

    def maybe_strike(self, phase: str) -> None:
        if self.strikes_in(phase):
            assert self.fault is not None
            self.fault.strike()

    def on_fit_start(self) -> None:
        middle = list(self.parameters())[len(list(self.parameters())) // 2]
        middle.register_hook(lambda _: self.maybe_strike("backward"))

    def training_step(self, _: Any, batch_idx: int) -> Tensor:
        self.maybe_strike("forward")
        step, rank = self.trainer.global_step, self.trainer.global_rank
        return self.loss(list(batch(self.model_name, step, rank)))

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.maybe_strike("validation")
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # Rank 0 strikes while it writes, the others on the way there.
        if self.trainer.global_rank != 0:
            self.maybe_strike("saving")


@contextmanager
def struck(net: FaultyNet) -> Iterator[None]:
    """Puts the fault into what no hook of the user's sees: gathers, and the writing of a file."""
    kind, save = collectives_kind(), torch.save
    launch = kind.launch_all_gather
    num_launched = 0

    def launch_struck(self: PairwiseCollectives, buffer: Tensor, bucket: int) -> Any:
        nonlocal num_launched
        num_launched += 1
        if net._trainer is not None:
            net.maybe_strike("step")
            if num_launched % 2:
                net.maybe_strike("gathers")
        return launch(self, buffer, bucket)

    def save_struck(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        if net._trainer is not None and net.strikes_in("saving"):
            # What is on the disk when the power goes: the beginning of the file.
            path = getattr(file, "name", None)
            save(value, file, *args, **kwargs)
            if path is not None:
                file.flush()
                os.truncate(path, os.path.getsize(path) // 2)
            net.maybe_strike("saving")
        save(value, file, *args, **kwargs)

    kind.launch_all_gather = launch_struck  # type: ignore[method-assign]
    torch.save = save_struck
    try:
        yield
    finally:
        kind.launch_all_gather = launch  # type: ignore[method-assign]
        torch.save = save


def new_strategy(**options: Any) -> DearStrategy:
    """Several buckets and a short timeout."""
    fusion = ThresholdFusion(bucket_cap_mb=0.02, first_bucket_cap_mb=0.005)
    return DearStrategy(**{"fusion": fusion, "timeout": TIMEOUT, **options})


def checkpoint_in(folder: Path) -> Path:
    """The one file, overwritten by every save, in which training is kept."""
    return folder / "kept.ckpt"


def train(
    folder: Path, fault: Fault | None, is_resumed: bool = False, *others: Callback
) -> list[list[Tensor]]:
    """Trains on this rank; returns the weights after each step and at the end."""
    recorder = WeightRecorder()
    trainer = new_trainer(new_strategy(), recorder, *others, keeper_in(folder), **OPTIONS)
    net = fit(trainer, fault, str(checkpoint_in(folder)) if is_resumed else None)
    return [*recorder.seen, copies(net)]


OPTIONS: dict[str, Any] = {
    "max_epochs": -1,
    "max_steps": NUM_STEPS,
    "val_check_interval": 1,
    "limit_val_batches": 1,
    "enable_checkpointing": True,
}


def keeper_in(folder: Path) -> ModelCheckpoint:
    """Overwrites one file every other step."""
    return ModelCheckpoint(
        folder, "kept", every_n_train_steps=SAVED_EVERY, enable_version_counter=False
    )


def fit(trainer: Trainer, fault: Fault | None, ckpt_path: str | None = None) -> FaultyNet:
    """Fits a net with the fault in it, the same at every call."""
    net = FaultyNet(fault)
    torch.manual_seed(0)
    with struck(net):
        trainer.fit(net, data("gpt", 48), data("gpt", 12), ckpt_path=ckpt_path)
    return net
