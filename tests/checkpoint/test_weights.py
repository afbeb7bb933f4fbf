"""Weights for others: what a safetensors file holds, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torch import nn
from typing_extensions import override

from lightning_dear.checkpoint import weights
from tests.distributed.harness import distributed
from tests.lightning.fitting import dear, fit
from tests.lightning.nets import Net


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embedding.weight
        self.short = nn.Parameter(torch.randn(3).bfloat16())
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("nothing", torch.empty(0, 4))
        self.register_buffer("transposed", torch.arange(6.0).reshape(2, 3).t())


def saved(folder: Path, state: Any, **more: Any) -> Path:
    path = folder / "last.ckpt"
    torch.save({"state_dict": state, **more}, path)
    return path


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        one.dtype == b[name].dtype and torch.equal(one, b[name]) for name, one in a.items()
    )


def test_all_weights_are_there_bit_for_bit_and_tied_ones_once(tmp_path: Path) -> None:
    model, file = Tied(), tmp_path / "model.safetensors"
    state = model.state_dict()
    weights.export(saved(tmp_path, state), file)
    plain = safetensors.torch.load_file(file)
    assert state.keys() - plain.keys() == {"head.weight"}
    read = weights.read(file)
    assert equal(read, dict(state))
    assert read["head.weight"] is read["embedding.weight"]
    fresh = Tied()
    assert safetensors.torch.load_model(fresh, file) == (set(), [])
    assert equal(fresh.state_dict(), state)


def test_prefixes_are_cut_on_request(tmp_path: Path) -> None:
    state = {"net._orig_mod.a": torch.ones(2), "loss.b": torch.zeros(1)}
    path = saved(tmp_path, state)
    weights.export(path, tmp_path / "cut", cut=["net.", "_orig_mod."])
    assert weights.read(tmp_path / "cut").keys() == {"a", "loss.b"}
    weights.export(
        saved(tmp_path, {"net.a": torch.ones(1), "norm": torch.ones(1)}),
        tmp_path / "one",
        cut="net.",
    )
    assert weights.read(tmp_path / "one").keys() == {"a", "norm"}
    path = saved(tmp_path, state)
    with pytest.raises(ValueError, match=r"No name begins with 'model\.'; the first one is 'net"):
        weights.export(path, tmp_path / "none", cut=["model."])
    both = saved(tmp_path, {"net.a": torch.ones(2), "a": torch.zeros(2)})
    with pytest.raises(ValueError, match="two entries have one name"):
        weights.export(both, tmp_path / "none", cut=["net."])
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "value",
    [
        {"nested": torch.ones(1)},
        torch.eye(2).to_sparse(),
        torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
    ],
    ids=["dict", "sparse", "quantized"],
)
@pytest.mark.filterwarnings("ignore:.*quantize.*")
def test_what_is_no_plain_tensor_is_refused_by_name(value: Any, tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": torch.ones(1), "b._extra_state": value})
    with pytest.raises(ValueError, match=r"cannot hold b\._extra_state of .*last\.ckpt"):
        weights.export(path, tmp_path / "file", weights_only=False)
    assert not (tmp_path / "file").exists()


def test_damage_is_found_on_both_sides(tmp_path: Path) -> None:
    path, file = saved(tmp_path, Tied().state_dict()), tmp_path / "file.safetensors"
    weights.export(path, file)
    good = file.read_bytes()
    for wrong in (good[:-3], good[:40], b"", good[:-1] + bytes([good[-1] ^ 1])):
        file.write_bytes(wrong)
        with pytest.raises(ValueError, match=r"file\.safetensors"):
            weights.read(file)
    data = bytearray(path.read_bytes())
    data[data.index(torch.arange(6.0).numpy().tobytes()) + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"last\.ckpt"):
        weights.export(path, tmp_path / "other")
    with pytest.raises(ValueError, match="last"):
        weights.export(saved(tmp_path, None), tmp_path / "other")


def test_changes_of_what_is_said_of_tied_weights_are_found(tmp_path: Path) -> None:
    path, file = saved(tmp_path, Tied().state_dict()), tmp_path / "file.safetensors"
    weights.export(path, file)
    good = file.read_bytes()
    begin = good.index(b"tied")
    for at in range(begin, good.index(b"sha256") + 80):
        file.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(ValueError, match=r"file\.safetensors"):
            weights.read(file)


def test_folders_and_tensors_without_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder"):
        weights.read(tmp_path)
    path = saved(tmp_path, {"a": torch.ones(1, device="meta")})
    with pytest.raises(ValueError, match="cannot hold a of"):
        weights.export(path, tmp_path / "file")
    with pytest.raises(ValueError, match="the first one is None"):
        weights.export(saved(tmp_path, {}), tmp_path / "file", cut="net.")


def test_files_of_other_programs_are_read(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(3)}, tmp_path / "theirs")
    assert equal(weights.read(tmp_path / "theirs"), {"a": torch.ones(3)})
    with pytest.raises(FileNotFoundError):
        weights.read(tmp_path / "nowhere")


class Saves(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.state: dict[str, Any] = {}

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(self.path)
        self.state = {name: one.clone() for name, one in pl_module.state_dict().items()}


@distributed((2,))
def test_folders_and_averages_of_a_training(tmp_path: Path) -> None:
    strategy, saves = dear(save_distributed_checkpoint=True), Saves(tmp_path / "folder.ckpt")
    fit(strategy, Net("mlp", "adamw"), WeightAveraging(), saves, max_epochs=2)
    if torch.distributed.get_rank() == 0:
        weights.export(saves.path, tmp_path / "average")
        weights.export(saves.path, tmp_path / "current", current=True)
        assert equal(weights.read(tmp_path / "current"), saves.state)
        average = weights.read(tmp_path / "average")
        assert average.keys() == saves.state.keys()
        assert not equal(average, saves.state)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, file = saved(tmp_path, {"net.a": torch.ones(2)}), tmp_path / "file"
    weights.main([str(path), str(file), "--cut", "net."])
    assert weights.read(file).keys() == {"a"}
    (tmp_path / "other").mkdir()
    foreign = saved(tmp_path / "other", {"a": slice(1)})
    for wrong, said in (
        ([path, file], "exists already"),
        ([path, tmp_path / "new", "--current"], "has no 'current_model_state'"),
        ([tmp_path / "none.ckpt", tmp_path / "new"], "none.ckpt"),
        ([foreign, tmp_path / "new"], "source, pass --trusted."),
    ):
        with pytest.raises(SystemExit) as ended:
            weights.main(list(map(str, wrong)))
        assert ended.value.code == 1
        assert said in capsys.readouterr().err
