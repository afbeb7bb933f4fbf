"""What the ranks on an emulated cluster run: a plain stack of layers, trained and taken apart."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_dear import DearStrategy
from lightning_dear.callbacks import DearMonitor
from lightning_dear.emulation import EmulatedHost
from lightning_dear.telemetry.timeline import Span, Timeline
from tests.lightning.fitting import new_trainer

WIDTH = 1024


class Stack(LightningModule):
    """`num_layers` x Linear(1024, 1024), 4 MiB each, under SGD with momentum."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            *[
                part
                for _ in range(num_layers)
                for part in (nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())
            ]
        )

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)

    @property
    def num_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters())


@dataclass
class Probe(Callback):
    """Step times, bytes of the host's interface at the end of every step, and one timeline."""

    host: EmulatedHost | None = None
    traced_step: int | None = None
    ends_s: list[float] = field(default_factory=list)
    wire: list[tuple[int, int]] = field(default_factory=list)
    ledger: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    timeline: Timeline | None = None

    @override
    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if self.traced_step is not None and len(self.ends_s) == self.traced_step:
            self.timeline = trainer.strategy.timeline = Timeline()

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.ends_s.append(time.perf_counter())
        self.ledger.append(trainer.strategy.statistics.wire_bytes)
        if self.host is not None:
            trainer.strategy.complete_parameters()
            dist.barrier()
            self.wire.append(self.host.wire_bytes())
        if self.timeline is not None and len(self.ends_s) == self.traced_step + 2:
            self.timeline.clock.finish()
            self.spans = self.timeline.spans
            trainer.strategy.timeline = self.timeline = None

    def steps_s(self) -> list[float]:
        """Seconds from the end of one batch to the end of the next, without the first steps."""
        pairs = zip(self.ends_s[2:], self.ends_s[3:], strict=False)
        return [after - before for before, after in pairs]


def train(
    num_layers: int, batch_size: int, num_steps: int, probe: Probe, **options: Any
) -> DearStrategy:
    """Fits a `Stack` for some steps on this rank."""
    # A callback that the strategy does not know would make it wait before each batch hook.
    from lightning_dear.callbacks import guards

    guards._NON_READERS |= {Probe}
    strategy = DearStrategy()
    trainer = new_trainer(strategy, DearMonitor(), probe, **options)
    inputs = torch.randn(batch_size, WIDTH, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs.repeat(num_steps * trainer.world_size, 1))
    trainer.fit(Stack(num_layers), DataLoader(data, batch_size))
    return strategy


def seconds_of(action: Callable[[], object], repeats: int) -> float:
    """Median seconds of `action`, all ranks starting together."""
    taken = []
    for _ in range(repeats):
        dist.barrier()
        start_s = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start_s)
    return median(taken)


def compute_alone(num_layers: int, batch_size: int) -> Callable[[], None]:
    """A step without communication, on every rank at once."""
    module = Stack(num_layers)
    optimizer = module.configure_optimizers()
    inputs = torch.randn(batch_size, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        module.training_step([inputs], 0).backward()
        optimizer.step()

    return step


def communication_alone(strategy: DearStrategy) -> Callable[[], None]:
    """The same buckets' reduce-scatters, then their all-gathers, with nothing beside them."""
    from lightning_dear.collectives.factory import new_collectives
    from lightning_dear.collectives.shards import shard_of

    assert strategy.plan is not None
    collectives = new_collectives(torch.device("cpu"))
    buffers = [torch.zeros(bucket.padded_numel) for bucket in strategy.plan.buckets]
    scratch = [torch.empty(collectives.scratch_numel(one.numel())) for one in buffers]
    owns = [shard_of(one, collectives.world.rank, collectives.world.size) for one in buffers]

    def exchange() -> None:
        works = [
            collectives.launch_reduce_scatter(
                buffers[number], scratch[number], owns[number], number
            )
            for number in strategy.plan.reduce_order
        ]
        for work in works:
            work.wait()
        works = [collectives.launch_all_gather(one, i) for i, one in enumerate(buffers)]
        for work in works:
            work.wait()

    return exchange


def default_callbacks(directory: str) -> dict[str, Any]:
    """Trainer options under which Lightning's own default callbacks are on."""
    return {
        "enable_progress_bar": True,
        "enable_model_summary": True,
        "enable_checkpointing": True,
        "default_root_dir": os.path.join(directory, str(dist.get_rank())),
    }
