"""What a Trainer and Fabric refuse to go on from: damage, and the state of another optimizer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import AsyncCheckpointIO

from lightning_dear.checkpoint.files import CHECKPOINT_KEY
from lightning_dear.checkpoint.folder import SKELETON_FILE
from lightning_dear.checkpoint.optimizer_state import CLASS
from tests.checkpoint.test_damage import flip, place_of
from tests.distributed.harness import distributed
from tests.fabric.running import dear as fabric_dear
from tests.fabric.running import new_fabric
from tests.lightning.fitting import ddp, dear, fit
from tests.lightning.nets import Net
from tests.training.models import batch, build, loss_of

folders = partial(dear, save_distributed_checkpoint=True)
SAVERS: dict[str, Callable[..., Any]] = {"file": dear, "folder": folders}


def _on_rank_0(do: Callable[[], object]) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        do()
    dist.barrier()


@pytest.mark.parametrize("kind", SAVERS)
@distributed(world_sizes=[1, 2])
def test_a_flipped_bit_is_noticed_on_all_ranks(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "saved.ckpt"
    net = Net("mlp", "adamw")
    fit(SAVERS[kind](), net).save_checkpoint(path)
    name = "net.layers.0.weight"

    def damage() -> None:
        weight = net.state_dict()[name].flatten()[:8]
        files = [path] if path.is_file() else sorted(path.glob("__*"))
        (file,) = (one for one in files if weight.numpy().tobytes() in one.read_bytes())
        flip(file, place_of(weight, file) + 2)

    _on_rank_0(damage)
    # Folders are read whatever the strategy writes.
    for strategy in (dear, folders):
        with pytest.raises(ValueError, match="is damaged") as raised:
            fit(strategy(), Net("mlp", "adamw"), ckpt_path=str(path))
        assert str(path) in str(raised.value)
        assert kind == "file" or name in str(raised.value)
    again = {"max_epochs": 2, "ckpt_path": str(path)}
    assert fit(dear(check_digests=False), Net("mlp", "adamw"), **again).current_epoch == 2


@pytest.mark.parametrize("damage", ["empty", "cut", "foreign"])
@pytest.mark.parametrize("plugin", [None, AsyncCheckpointIO])
@distributed(world_sizes=[2])
def test_a_damaged_file_is_named_on_all_ranks(tmp_path: Path, damage: str, plugin: Any) -> None:
    path = tmp_path / "saved.ckpt"
    fit(dear(), Net("mlp", "adamw")).save_checkpoint(path)
    content = path.read_bytes()
    of = {"empty": b"", "cut": content[:5000], "foreign": b"step,loss\n1,2\n"}
    _on_rank_0(lambda: path.write_bytes(of[damage]))
    plugins = {} if plugin is None else {"checkpoint_io": plugin()}
    with pytest.raises(ValueError, match=str(path)) as raised:
        fit(dear(**plugins), Net("mlp", "adamw"), ckpt_path=str(path))
    assert len(str(raised.value).splitlines()) == 1


@distributed(world_sizes=[2])
def test_what_no_trainer_has_written_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    _on_rank_0(lambda: torch.save(Net("mlp", "adamw").state_dict(), path))
    with pytest.raises(ValueError, match=f"{path} is no Trainer's checkpoint"):
        fit(dear(), Net("mlp", "adamw"), ckpt_path=str(path))


# The state of another optimizer.


class OtherNet(Net):
    """With any optimizer."""

    def __init__(self, kind: type[torch.optim.Optimizer]) -> None:
        super().__init__("mlp")
        self.kind = kind

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), lr=0.01)


class Warmer(torch.optim.AdamW):
    """A user's own."""


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
@pytest.mark.parametrize("kind", SAVERS)
@distributed(world_sizes=[1, 2])
def test_another_optimizer_is_refused_by_both_names(tmp_path: Path, kind: str, gather: Any) -> None:
    path = tmp_path / "saved.ckpt"
    options = {"max_epochs": 2, "ckpt_path": str(path)}
    fit(SAVERS[kind](gather=gather), OtherNet(torch.optim.AdamW)).save_checkpoint(path)
    dist.barrier()
    for other in (torch.optim.SGD, torch.optim.Adamax):
        with pytest.raises(ValueError, match=f"state of AdamW, from which {other.__name__} cannot"):
            fit(dear(gather=gather), OtherNet(other), **options)
    # A subclass goes on, and so does DDP.
    assert fit(dear(gather=gather), OtherNet(Warmer), **options).current_epoch == 2
    if kind == "file":
        assert fit(ddp(), OtherNet(torch.optim.AdamW), **options).current_epoch == 2


@distributed(world_sizes=[2])
def test_a_state_that_does_not_say_whose_it_is_loads(tmp_path: Path) -> None:
    """As of earlier versions, and of DDP."""
    path = tmp_path / "saved.ckpt"
    fit(dear(), OtherNet(torch.optim.AdamW)).save_checkpoint(path)
    content = torch.load(path)
    assert content["optimizer_states"][0].pop(CLASS) == "AdamW"
    _on_rank_0(lambda: torch.save(content, path))
    trainer = fit(dear(), OtherNet(Warmer), max_epochs=2, ckpt_path=str(path))
    assert trainer.current_epoch == 2


# Fabric.


def _fabric_training(kind: type[torch.optim.Optimizer], **options: Any) -> Any:
    fabric = new_fabric(fabric_dear(**options))
    raw = build("mlp")
    model, optimizer = fabric.setup(raw, kind(raw.parameters(), lr=0.01))
    features, targets = batch("mlp", 0, fabric.global_rank)
    fabric.backward(loss_of(model, features, targets))
    optimizer.step()
    return fabric, {"model": model, "optimizer": optimizer}, raw


@distributed(world_sizes=[1, 2])
def test_fabric_refuses_the_same(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    fabric, state, raw = _fabric_training(torch.optim.AdamW)
    fabric.save(path, state)
    dist.barrier()
    other, other_state, _ = _fabric_training(torch.optim.SGD)
    with pytest.raises(ValueError, match="state of AdamW, from which SGD cannot"):
        other.load(path, other_state)
    weight = next(iter(raw.state_dict().values()))
    _on_rank_0(lambda: flip(path, place_of(weight, path)))
    with pytest.raises(ValueError, match="is damaged") as raised:
        fabric.load(path, state)
    assert str(path) in str(raised.value)
    lenient, lenient_state, _ = _fabric_training(torch.optim.AdamW, check_digests=False)
    lenient.load(path, lenient_state)
    _on_rank_0(lambda: path.write_bytes(b""))
    with pytest.raises(ValueError, match=str(path)):
        fabric.load(path, state)


@distributed(world_sizes=[2])
def test_a_copy_that_is_damaged_on_one_host_is_refused_on_all(tmp_path: Path) -> None:
    """Whoever goes back to an earlier checkpoint does so on all ranks."""
    path = tmp_path / f"host {dist.get_rank()}" / "saved.ckpt"
    fabric, state, raw = _fabric_training(torch.optim.AdamW)
    fabric.save(tmp_path / "saved.ckpt", state)
    dist.barrier()
    path.parent.mkdir()
    content = (tmp_path / "saved.ckpt").read_bytes()
    path.write_bytes(content[:3000] if dist.get_rank() == 1 else content)
    with pytest.raises(ValueError, match=str(tmp_path / "host 1")):
        fabric.load(path, state)
    fabric.load(tmp_path / "saved.ckpt", state)


@distributed(world_sizes=[2])
def test_a_copy_that_is_foreign_on_one_host_is_refused_on_all(tmp_path: Path) -> None:
    path = tmp_path / f"host {dist.get_rank()}" / "saved.ckpt"
    path.parent.mkdir()
    fit(dear(), Net("mlp", "adamw")).save_checkpoint(tmp_path / "saved.ckpt")
    dist.barrier()
    if dist.get_rank() == 1:
        torch.save({"epoch": 3}, path)
    else:
        shutil.copy(tmp_path / "saved.ckpt", path)
    with pytest.raises(ValueError, match=f"{tmp_path / 'host 1'}.* is no Trainer's checkpoint"):
        fit(dear(), Net("mlp", "adamw"), ckpt_path=str(path))


@pytest.mark.parametrize("kind", SAVERS)
@pytest.mark.parametrize("what", ["missing", "names code", "later format", "damaged"])
@distributed(world_sizes=[2])
def test_what_one_rank_cannot_read_fails_on_all(tmp_path: Path, kind: str, what: str) -> None:
    """Nobody waits for the one that has failed, whatever the reason."""
    saved, own = tmp_path / "saved.ckpt", tmp_path / f"host {dist.get_rank()}"
    fit(SAVERS[kind](), Net("mlp", "adamw")).save_checkpoint(saved)
    dist.barrier()
    path = own / "saved.ckpt"
    if kind == "folder":
        shutil.copytree(saved, path)
        file = path / SKELETON_FILE
    else:
        own.mkdir()
        file = Path(shutil.copy(saved, path))
    if dist.get_rank() == 1:
        content = torch.load(file, weights_only=False)
        content |= {
            "later format": {CHECKPOINT_KEY: {"format": 99}},
            "names code": {"x": path},
        }.get(what, {})
        torch.save(content, file)
        if what == "damaged":
            file.write_bytes(file.read_bytes()[:3000])
        if what == "missing":
            file.unlink()
    kinds = (ValueError, FileNotFoundError, UnpicklingError)
    with pytest.raises(kinds) as raised:
        fit(dear(), Net("mlp", "adamw"), ckpt_path=str(path))
    assert dist.get_rank() == 1 or isinstance(raised.value, ValueError)
    assert "99" in str(raised.value) or str(tmp_path / "host 1") in str(raised.value)
    # All are still together.
    dist.barrier()
