"""A Fabric on the calling rank, and what a training loop under it showed."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_dear.fabric import DearFabricStrategy
from lightning_dear.planning import ThresholdFusion
from tests.lightning.fitting import TIMEOUT, assert_ranks_agree, assert_same, poison_until_waited
from tests.lightning.nets import copies
from tests.training.models import batch, distance

NUM_STEPS = 6


def dear(**options: Any) -> DearFabricStrategy:
    """Ours, with several buckets even for the small models and tensors split between them."""
    options.setdefault("fusion", ThresholdFusion(bucket_cap_mb=0.02, first_bucket_cap_mb=0.005))
    return DearFabricStrategy(timeout=TIMEOUT, **options)


def ddp(**options: Any) -> DDPStrategy:
    """The one to compare with."""
    return DDPStrategy(timeout=TIMEOUT, **options)


STRATEGIES = {"dear": dear, "ddp": ddp}


def new_fabric(strategy: Any, *plugins: Any, **options: Any) -> Fabric:
    """A quiet Fabric on the CPU for the rank that calls, launched."""
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\.")
    fabric = Fabric(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        plugins=[TorchElasticEnvironment(), *plugins],
        **options,
    )
    fabric.launch()
    return fabric


@dataclass
class Run:
    """One training: what the loop runs in, and what it saw.

    Attributes:
        fabric: The loop's.
        optimizer: Name of the optimizers' kind.
        watches: Whether weights are read after every step, which forces waits.
        series: Name -> tensors, or lists of tensors, in order.
    """

    fabric: Fabric
    optimizer: str
    watches: bool = True
    series: dict[str, list[Any]] = field(default_factory=dict)

    def note(self, name: str, value: Any) -> None:
        """Appends a copy of `value`; reads no weights."""
        self.series.setdefault(name, []).append(value.detach().clone())

    def see(self, *modules: nn.Module) -> None:
        """Appends the weights, read as a user would."""
        if self.watches:
            self.series.setdefault("weights", []).append([w for m in modules for w in copies(m)])

    def end(self, *modules: nn.Module) -> None:
        """Appends the weights and buffers at the end."""
        self.series["end"] = [[w for m in modules for w in copies(m)]]
        if self.fabric.global_rank == 0:  # Under DDP rank 0's come with the next forward.
            self.series["buffers"] = [[b.clone() for m in modules for b in m.buffers()]]

    def data(self, model: str, step: int) -> tuple[Tensor, Tensor]:
        """This rank's batch."""
        return batch(model, step, self.fabric.global_rank)


Loop = Callable[[Run], None]


def run_loop(
    loop: Loop, optimizer: str, strategy: Any, *plugins: Any, watches: bool = True, **options: Any
) -> Run:
    """Runs `loop`; parameters that are still being gathered read as NaN."""
    torch.manual_seed(0)
    run = Run(new_fabric(strategy, *plugins, **options), optimizer, watches)
    with poison_until_waited():
        loop(run)
    return run


def assert_alike(ours: Run, theirs: Run, limits: Callable[[str], float]) -> None:
    """Every series of `ours` is that of `theirs`: by the bit where the limit is 0.

    Args:
        ours: Ranks must agree in it, too.
        theirs: The reference; its weights are not compared where `ours` did not watch.
        limits: Name of a series -> how far apart, as norm of the difference over the norm.
    """
    assert ours.series.keys() - theirs.series.keys() == set()
    assert theirs.series.keys() - ours.series.keys() <= {"weights"}
    for name, values in ours.series.items():
        if not limits(name):
            assert_same(values, theirs.series[name], name)
            continue
        assert len(values) == len(theirs.series[name])
        for step, (left, right) in enumerate(zip(values, theirs.series[name], strict=True)):
            pair = (left, right) if isinstance(left, list) else ([left], [right])
            assert not pair[1] or distance(*pair) <= limits(name), f"{name}[{step}]"
    assert_ranks_agree([*ours.series.get("weights", []), *ours.series["end"]])
