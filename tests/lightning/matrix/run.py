"""Runs one row on a rank: the reference, ours watched, and ours with nobody looking."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy

from tests.lightning.fitting import (
    assert_differ,
    assert_ranks_agree,
    ddp,
    dear,
    new_trainer,
    poison_until_waited,
)
from tests.lightning.matrix.rows import Feature
from tests.lightning.matrix.seen import Seen, Watch, compare, gather_seen
from tests.lightning.nets import BATCH_SIZE, data


def run_row(row: Feature, optimizer: str, folder: Path) -> None:
    """Compares every series of `row`; on every rank. Collective, blocks."""
    world_size = int(os.environ["WORLD_SIZE"])
    rank = os.environ["RANK"]
    theirs = run_one(
        row, _reference(row), row.reference_net or row.net, optimizer, folder / "theirs"
    )
    watched = run_one(row, ours(row), row.net, optimizer, folder / "ours")
    # At one rank nothing is gathered, so that looking changes nothing.
    alone = (
        run_one(row, ours(row), row.net, optimizer, folder / "alone", watches=False)
        if world_size > 1
        else watched
    )
    for name, entries in theirs.series.items():
        if rank != "0" and name in ("buffers", "averaged buffers", "buffers after fit"):
            continue  # rank 0's come at the end of a step, under DDP with the next forward
        limit = row.distance(world_size, name)
        for seen in (watched, alone):
            if name in seen.series or seen is watched:
                where = f"{row.name}, rank {rank}" + ("" if seen is watched else ", unwatched")
                compare(seen.series[name], entries, limit, f"{where}: {name}")
    assert set(watched.series) == set(theirs.series)
    for name in ("weights", "averages", "weights after fit", "buffers after fit"):
        assert_ranks_agree(watched.series.get(name, []))
    assert watched.num_steps == theirs.num_steps, "optimizer steps"
    assert row.num_steps in (None, watched.num_steps), f"{watched.num_steps} optimizer steps"
    if row.trains:
        assert_differ(watched.series["weights"][0], watched.series["weights"][-1])
    row.check(watched)


def ours(row: Feature) -> Strategy:
    return dear(**row.strategy)


def _reference(row: Feature) -> Strategy:
    if row.reference == "single":
        return SingleDeviceStrategy(device="cpu")
    if row.reference not in ("ddp", "ddp, unused"):
        raise ValueError(f"unknown reference {row.reference!r}")
    return ddp(find_unused_parameters=row.reference == "ddp, unused")


def run_one(
    row: Feature,
    strategy: Strategy,
    build: Any,
    optimizer: str,
    folder: Path,
    *,
    watches: bool = True,
) -> Seen:
    torch.compiler.reset()
    module: LightningModule = build(optimizer)
    watch = Watch() if watches else None
    is_single = isinstance(strategy, SingleDeviceStrategy)
    world_size = 1 if is_single else int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    trainer = new_trainer(
        strategy,
        *row.callbacks(folder),
        *([] if watch is None else [watch]),
        devices=world_size,
        plugins=[
            LightningEnvironment() if is_single else TorchElasticEnvironment(),
            *row.plugins(),
        ],
        **row.options(int(os.environ["WORLD_SIZE"])),
    )
    loader = data(row.data, BATCH_SIZE * world_size * row.num_batches)
    with poison_until_waited():
        row.drive(trainer, module, loader)
    return gather_seen(trainer, getattr(module, "_orig_mod", module), watch)
