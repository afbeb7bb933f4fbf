"""Fits a module under one strategy inside a rank, and compares two fits by the bit."""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from typing_extensions import override

from lightning_dear import DearStrategy
from lightning_dear.collectives.gloo import PairwiseCollectives
from lightning_dear.collectives.shards import shard_of
from lightning_dear.collectives.two_hops import TwoHopCollectives
from lightning_dear.collectives.work import Work
from lightning_dear.optimizers import sharded
from lightning_dear.planning import ThresholdFusion
from tests.distributed.rank import RANKS_A_HOST
from tests.lightning.nets import Net, copies, data

TIMEOUT = timedelta(seconds=40)

# The optimizer is called several times a step even for small models.
sharded.MAX_RUN_NUMEL = 1 << 11


def dear(**options: Any) -> DearStrategy:
    """Ours, with several buckets even for the small models and tensors split between them."""
    options.setdefault("fusion", ThresholdFusion(bucket_cap_mb=0.02, first_bucket_cap_mb=0.005))
    return DearStrategy(**{"timeout": TIMEOUT, **options})


def ddp(**options: Any) -> DDPStrategy:
    """The one to compare with."""
    return DDPStrategy(timeout=TIMEOUT, **options)


SHORT = timedelta(seconds=5)
"""A timeout where one rank fails and lives on, so that others wait for all of it."""

STRATEGIES = {"ddp": ddp, "dear": dear}


def new_trainer(strategy: Strategy | str, *callbacks: Callback, **options: Any) -> Trainer:
    """A quiet CPU trainer for the rank that calls."""
    for namespace in ("pytorch", "fabric"):
        logging.getLogger(f"lightning.{namespace}").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\.")
    defaults = {
        "devices": int(os.environ["WORLD_SIZE"]),
        "plugins": [TorchElasticEnvironment()],
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return Trainer(
        accelerator="cpu",
        strategy=strategy,
        callbacks=list(callbacks),
        **{**defaults, **options},
    )


def fit(
    strategy: Strategy | str,
    module: LightningModule,
    *callbacks: Callback,
    model: str = "mlp",
    num_samples: int = 24,
    validates: bool = False,
    ckpt_path: str | None = None,
    **options: Any,
) -> Trainer:
    """Seeds, then fits `module`; parameters that are still being gathered read as NaN."""
    torch.manual_seed(0)
    trainer = new_trainer(strategy, *callbacks, **options)
    loader = data(model, num_samples)
    with poison_until_waited():
        trainer.fit(module, loader, loader if validates else None, ckpt_path=ckpt_path)
    return trainer


def collectives_kind() -> type[PairwiseCollectives]:
    """What is used here: where ranks pretend to share hosts, two hops."""
    return TwoHopCollectives if RANKS_A_HOST in os.environ else PairwiseCollectives


@contextmanager
def poison_until_waited() -> Iterator[None]:
    """Makes every read of a parameter that was not waited for see NaN, however fast the link.

    Gathers run as ever, but land aside and are put in place by whoever waits.
    """
    kind = collectives_kind()
    launch, expect = kind.launch_all_gather, kind.expect_all_gather

    @torch.no_grad()
    def launch_aside(self: PairwiseCollectives, buffer: Tensor, bucket: int) -> Work:
        aside = buffer.clone()
        work = launch(self, aside, bucket)
        if work.is_done:
            return work
        for rank in range(self.world.size):
            if rank != self.world.rank and buffer.is_floating_point():
                shard_of(buffer, rank, self.world.size).fill_(float("nan"))
        return Work(work.wait, lambda: put(buffer, aside))

    @torch.no_grad()
    def put(buffer: Tensor, aside: Tensor) -> None:
        buffer.copy_(aside)

    kind.expect_all_gather = lambda self, buffer, bucket: None  # type: ignore[method-assign]
    kind.launch_all_gather = launch_aside  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.expect_all_gather = expect  # type: ignore[method-assign]
        kind.launch_all_gather = launch  # type: ignore[method-assign]


@dataclass
class WeightRecorder(Callback):
    """Keeps what a user's callback sees at the end of every batch."""

    seen: list[list[Tensor]] = field(default_factory=list)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.seen.append(copies(pl_module))


@dataclass
class HeldListRecorder(Callback):
    """Reads the weights through a list taken before the first step, past the module."""

    held: list[nn.Parameter] = field(default_factory=list)
    seen: list[list[Tensor]] = field(default_factory=list)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.held = list(pl_module.parameters())

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append([parameter.detach().clone() for parameter in self.held])


def assert_same(ours: Iterable[Any], theirs: Iterable[Any], what: str) -> None:
    """Bit for bit; tensors may stand in lists of any depth."""
    ours, theirs = list(ours), list(theirs)
    assert len(ours) == len(theirs), f"{what}: {len(ours)} against {len(theirs)}"
    for number, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        name = f"{what}[{number}]"
        if isinstance(left, Tensor):
            assert left.dtype == right.dtype, name
            assert torch.equal(left, right), f"{name}: off by {(left - right).abs().max():.1e}"
        else:
            assert_same(left, right, name)


def assert_same_optimizer(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Two optimizers' `state_dict()`s: the same groups, and the same state bit for bit."""
    assert ours["param_groups"] == theirs["param_groups"]
    assert sorted(ours["state"]) == sorted(theirs["state"])
    for number, entries in theirs["state"].items():
        assert list(ours["state"][number]) == list(entries)
        assert_same(ours["state"][number].values(), entries.values(), f"state {number}")


def assert_differ(left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    """Two sets of weights are not the same: what should have trained has."""
    assert any(not torch.equal(a, b) for a, b in zip(left, right, strict=True))


def digest(tensors: Iterable[Tensor]) -> str:
    """A hash of all bytes."""
    hashed = hashlib.sha256()
    for tensor in tensors:
        # As bytes, since numpy has no bfloat16.
        flat = tensor.detach().contiguous().flatten()
        hashed.update(flat.view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def assert_ranks_agree(steps: Iterable[Sequence[Tensor]]) -> None:
    """Every rank has the same bits in every step. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [digest(tensors) for tensors in steps])
    for rank, other in enumerate(everyone):
        for step, (left, right) in enumerate(zip(everyone[0], other, strict=True)):
            assert left == right, f"rank {rank} left rank 0 in step {step}"


def buffers(module: nn.Module) -> list[Tensor]:
    """Copies of all buffers."""
    return [buffer.detach().clone() for buffer in module.buffers()]


def fit_both(model: str, optimizer: str, **options: Any) -> dict[str, tuple[Net, WeightRecorder]]:
    """The same fit under DDP and under ours, watched by a user's callback."""
    fits = {}
    for name, strategy in STRATEGIES.items():
        net, recorder = Net(model, optimizer), WeightRecorder()
        fit(strategy(), net, recorder, model=model, **options)
        fits[name] = net, recorder
    return fits
