"""A save that fails says why and where, leaves nothing behind, and nothing else changed."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import PicklingError
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from lightning_dear.checkpoint.files import beside, write
from lightning_dear.checkpoint.folder import load, save
from lightning_dear.strategy.checkpoint_io import AtomicCheckpointIO
from tests.distributed.harness import run_ranks
from tests.training.models import build, optimizer_for
from tests.training.three_ways import new_pipeline, train_steps

LIMIT_BYTES = 100_000


@contextmanager
def files_of_at_most(limit_bytes: int) -> Iterator[None]:
    """No file of this process gets longer: as on a full disk, and without being root."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with 300 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(place)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs root, to mount a small file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def content(numel: int) -> dict[str, Any]:
    return {"state_dict": {"w": torch.ones(numel)}}


@pytest.mark.parametrize("numel", [60_000, 10**6])
def test_a_file_that_does_not_fit(small_disk: Path, numel: int) -> None:
    target = small_disk / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(content(20_000), target)
    with pytest.raises(OSError, match=f"No space left on device: '{target}'") as raised:
        AtomicCheckpointIO().save_checkpoint(content(numel), target)
    assert raised.value.errno == errno.ENOSPC
    assert os.listdir(small_disk) == ["last.ckpt"]
    assert len(torch.load(target)["state_dict"]["w"]) == 20_000
    # There is room again.
    AtomicCheckpointIO().save_checkpoint(content(30_000), small_disk / "next.ckpt")


@pytest.mark.parametrize("numel", [60_000, 10**6])
def test_a_folder_that_does_not_fit(small_disk: Path, numel: int) -> None:
    target = small_disk / "last.ckpt"
    save(target, content(20_000))
    with pytest.raises(CheckpointException, match=f"Errno 28.*: '{target}'"):
        save(target, content(numel))
    assert os.listdir(small_disk) == ["last.ckpt"]
    assert len(load(target)["state_dict"]["w"]) == 20_000
    save(small_disk / "next.ckpt", content(20_000))


def test_a_file_that_gets_too_long(tmp_path: Path) -> None:
    target = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(content(10), target)
    with (
        files_of_at_most(LIMIT_BYTES),
        pytest.raises(OSError, match=f"File too large: '{target}'") as raised,
    ):
        AtomicCheckpointIO().save_checkpoint(content(10**6), target)
    assert raised.value.errno == errno.EFBIG
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert len(torch.load(target)["state_dict"]["w"]) == 10


def _save_what_one_rank_cannot(path: Path, rank: int) -> str:
    model = build("wide_mlp")
    optimizer = optimizer_for("adamw", model)
    pipeline = new_pipeline(model, optimizer)
    train_steps(pipeline, model, range(1))
    state = pipeline.of(optimizer).sharded_state_dict()
    held = {"state_dict": model.state_dict(), "optimizer_states": [state]}
    save(path, held)
    limit = LIMIT_BYTES if dist.get_rank() == rank else resource.RLIM_INFINITY
    with files_of_at_most(limit), pytest.raises(CheckpointException) as raised:
        save(path, held)
    dist.barrier()
    assert os.listdir(path.parent) == [path.name]
    load(path)
    # And the next one is written as if nothing had been.
    save(path.with_name("next"), held)
    dist.barrier()
    return str(raised.value)


@pytest.mark.parametrize(("world_size", "rank"), [(1, 0), (2, 0), (2, 1), (3, 1)])
def test_all_ranks_tell_the_reason_of_one(tmp_path: Path, world_size: int, rank: int) -> None:
    said = run_ranks(_save_what_one_rank_cannot, world_size, tmp_path / "last", rank)
    assert all(f"[Errno 27] File too large: '{tmp_path / 'last'}'" in one for one in said)
    assert all(f"RANK {rank}" in one for one in said)
    assert sorted(os.listdir(tmp_path)) == ["last", "next"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    target = tmp_path / "file" / "last.ckpt"
    with pytest.raises(OSError, match=f"'{target}'"):
        write({}, target)
    with pytest.raises(CheckpointException, match=str(target.parent)):
        save(target, content(2000))
    assert os.listdir(tmp_path) == ["file"]


def test_what_failed_before_is_no_reason(tmp_path: Path) -> None:
    """As where a checkpoint is saved since a training failed."""
    try:
        raise OSError(errno.EIO, "of the data", "data.csv")
    except OSError:
        with pytest.raises((PicklingError, AttributeError)):
            write({"step": lambda: None}, tmp_path / "last.ckpt")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_a_killed_save_has_left_goes_with_the_next_one(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "last.ckpt"
    if kind == "file":
        beside(target, "writing").write_bytes(b"half")
        AtomicCheckpointIO().save_checkpoint(content(2000), target)
    else:
        (beside(target, "saving") / "strays").mkdir(parents=True)
        save(target, content(2000))
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert target.is_dir() == (kind == "folder")
