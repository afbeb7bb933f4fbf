"""Checkpoint folders: every rank writes its pieces; any world size gets the same bits back."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.optim import Optimizer

from lightning_dear.checkpoint import files as checkpoint_files
from lightning_dear.checkpoint import folder as distributed_checkpoint
from lightning_dear.checkpoint import storage as checkpoint_storage
from lightning_dear.checkpoint.files import CHECKPOINT_KEY
from lightning_dear.checkpoint.folder import convert, is_folder, load, making_way, remove, save
from lightning_dear.checkpoint.optimizer_state import sharded_state
from lightning_dear.checkpoint.storage import put_together, take_apart
from lightning_dear.engine.pipeline import Pipeline
from tests.distributed.harness import RanksFailed, distributed, observe_ranks, run_ranks
from tests.training.models import build, optimizer_for, two_groups, weights
from tests.training.three_ways import new_pipeline, train_steps

CASES = [
    ("mlp", "adamw"),
    ("mlp", "sgd"),
    ("channels_last", "adamw"),
    ("gpt", "adam"),
    ("mlp", "nadam"),
]


def _sharded(pipeline: Pipeline, optimizer: Optimizer) -> dict[str, Any]:
    return pipeline.of(optimizer).sharded_state_dict()


def _whole(pipeline: Pipeline, optimizer: Optimizer) -> dict[str, Any]:
    return pipeline.of(optimizer).optimizer_state_dict()


def _checkpoint(model: nn.Module, *states: dict[str, Any]) -> dict[str, Any]:
    return {
        "epoch": 3,
        "state_dict": model.state_dict(),
        "optimizer_states": list(states),
        "lr_schedulers": [],
        "hyper_parameters": {"width": 3, "names": ("a", "b")},
    }


def _train_and_save(folder: Path, name: str, optimizer_name: str) -> dict[str, Any]:
    model = build(name)
    optimizer = optimizer_for(optimizer_name, model)
    pipeline = new_pipeline(model, optimizer)
    train_steps(pipeline, model, range(3), name)
    save(folder, _checkpoint(model, _sharded(pipeline, optimizer)))
    return copy.deepcopy(_checkpoint(model, _whole(pipeline, optimizer)))


def _resume(checkpoint: dict[str, Any], name: str, optimizer_name: str) -> list[Tensor]:
    model = build(name, seed=1)
    optimizer = optimizer_for(optimizer_name, model)
    pipeline = new_pipeline(model, optimizer)
    model.load_state_dict(checkpoint["state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    train_steps(pipeline, model, range(3, 5), name)
    return weights(model)


def assert_equal(ours: Any, theirs: Any, where: str = "") -> None:
    """The same by type, order, layout and bit."""
    assert type(ours) is type(theirs), where
    if isinstance(theirs, Tensor):
        assert ours.dtype == theirs.dtype, where
        assert ours.stride() == theirs.stride(), where
        assert ours.device == theirs.device, where
        assert torch.equal(ours, theirs), where
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs), where
        for key, value in theirs.items():
            assert_equal(ours[key], value, f"{where}[{key!r}]")
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), where
        for place, value in enumerate(theirs):
            assert_equal(ours[place], value, f"{where}[{place}]")
    else:
        assert ours == theirs, where


def _load_and_compare(
    folder: Path, ordinary: dict[str, Any], name: str, optimizer_name: str
) -> None:
    loaded = load(folder)
    assert_equal(loaded, ordinary)
    ours = _resume(loaded, name, optimizer_name)
    theirs = _resume(ordinary, name, optimizer_name)
    for left, right in zip(ours, theirs, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize(("name", "optimizer_name"), CASES)
@pytest.mark.parametrize("saver", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_any_world_size_loads_the_bits_that_consolidating_gives(
    tmp_path: Path, saver: int, name: str, optimizer_name: str
) -> None:
    folder = tmp_path / "saved"
    ordinary = run_ranks(_train_and_save, saver, folder, name, optimizer_name)[0]
    assert len(ordinary["optimizer_states"][0]["state"]) > 0
    for loader in (1, 2, 3):
        run_ranks(_load_and_compare, loader, folder, ordinary, name, optimizer_name)
    # Here there is no process group.
    assert_equal(load(folder), ordinary)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def _save_two_optimizers(folder: Path) -> dict[str, Any]:
    """One optimizer that leaves parameters without state, and one that was never stepped."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(7, 300), "unused": nn.Linear(300, 300)})
    idle = nn.Linear(40, 40)
    both = nn.ModuleList([model, idle])
    optimizers = [torch.optim.AdamW(two_groups(model)), torch.optim.AdamW(idle.parameters())]
    pipeline = new_pipeline(both, optimizers[0], more=optimizers[1:])
    with pipeline.forward():
        loss = model["used"](torch.ones(2, 7)).square().sum()
    with pipeline.backward():
        loss.backward()
    optimizers[0].step()
    save(folder, _checkpoint(both, *(_sharded(pipeline, one) for one in optimizers)))
    whole = (_whole(pipeline, one) for one in optimizers)
    return copy.deepcopy(_checkpoint(both, *whole))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_several_optimizers_and_parameters_without_state(tmp_path: Path, world_size: int) -> None:
    ordinary = run_ranks(_save_two_optimizers, world_size, tmp_path / "saved")[0]
    assert [len(state["state"]) for state in ordinary["optimizer_states"]] == [2, 0]
    assert_equal(load(tmp_path / "saved"), ordinary)


def _save_16_bits(folder: Path) -> dict[str, Any]:
    model = build("mlp", dtype=torch.bfloat16)
    optimizer = optimizer_for("adamw", model)
    pipeline = new_pipeline(model, optimizer)
    train_steps(pipeline, model, range(2))
    save(folder, _checkpoint(model, _sharded(pipeline, optimizer)))
    return copy.deepcopy(_checkpoint(model, _whole(pipeline, optimizer)))


def test_masters_of_16_bit_parameters_are_saved(tmp_path: Path) -> None:
    ordinary = run_ranks(_save_16_bits, 2, tmp_path / "saved")[0]
    state = load(tmp_path / "saved")["optimizer_states"][0]["state"]
    assert {entries["master_weight"].dtype for entries in state.values()} == {torch.float32}
    assert_equal(load(tmp_path / "saved"), ordinary)


# Nobody gathers: what a rank hands out is its own.


def _count_what_is_written(folder: Path) -> tuple[int, int, int]:
    model = build("wide_mlp")
    optimizer = torch.optim.AdamW(model.parameters())
    pipeline = new_pipeline(model, optimizer)
    train_steps(pipeline, model, range(2))
    handed, largest = 0, 0
    resolve = checkpoint_storage._SavePlanner.resolve_data

    def count(self: Any, item: Any) -> Tensor:
        nonlocal handed, largest
        tensor = resolve(self, item)
        handed, largest = handed + tensor.nbytes, max(largest, tensor.nbytes)
        return tensor

    checkpoint_storage._SavePlanner.resolve_data = count  # type: ignore[method-assign]
    try:
        save(folder, _checkpoint(model, _sharded(pipeline, optimizer)))
    finally:
        checkpoint_storage._SavePlanner.resolve_data = resolve  # type: ignore[method-assign]
    return handed, largest, sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_rank_writes_its_share_and_no_more(tmp_path: Path, world_size: int) -> None:
    folder = tmp_path / "saved"
    counted = run_ranks(_count_what_is_written, world_size, folder)
    parameters_bytes = counted[0][2]
    share = 3 * parameters_bytes / world_size  # The weights and AdamW's two tensors.
    for rank, (handed, largest, _) in enumerate(counted):
        assert handed == pytest.approx(share, rel=0.1)
        assert largest <= parameters_bytes / 4
        file_bytes = sum(file.stat().st_size for file in folder.glob(f"__{rank}_*"))
        assert handed < file_bytes < 1.2 * handed + 2**17
    assert sum(handed for handed, _, _ in counted) == pytest.approx(3 * parameters_bytes, rel=0.01)
    assert (folder / distributed_checkpoint.SKELETON_FILE).stat().st_size < 2**17


def _sharded_state_gathers_nothing() -> None:
    model = build("wide_mlp")
    optimizer = torch.optim.AdamW(model.parameters())
    pipeline = new_pipeline(model, optimizer)
    train_steps(pipeline, model, range(2))
    pipeline.complete_parameters()
    part = pipeline.of(optimizer)
    sent_before = part._training.collectives.ledger.total()
    own = {
        value.data_ptr()
        for piece in part.stepper.pieces
        for value in part.stepper.state_of(piece).values()
    }
    state = sharded_state(part.stepper, part._training.collectives)
    assert part._training.collectives.ledger.total() == sent_before
    chunks = [chunk for _, chunks in state.chunks for chunk in chunks]
    assert len(chunks) > len(list(model.parameters()))
    assert {chunk.values.data_ptr() for chunk in chunks} <= own
    for entries in state["state"].values():
        assert {entries[key].device.type for key in ("exp_avg", "exp_avg_sq")} == {"meta"}


def test_sharded_state_gathers_and_copies_nothing() -> None:
    run_ranks(_sharded_state_gathers_nothing, 2)


@distributed(world_sizes=[2])
def test_sharded_state_cannot_be_saved_by_mistake() -> None:
    model = build("mlp")
    optimizer = optimizer_for("adamw", model)
    pipeline = new_pipeline(model, optimizer)
    train_steps(pipeline, model, range(1))
    state = _sharded(pipeline, optimizer)
    for spoil in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="save_distributed_checkpoint"):
            spoil(state)
    assert state["param_groups"] == optimizer.state_dict()["param_groups"]


def _save_before_the_first_step(folder: Path) -> dict[str, Any]:
    model = build("mlp")
    optimizer = optimizer_for("adamw", model)
    pipeline = new_pipeline(model, optimizer)
    train_steps(pipeline, model, range(2))
    whole = copy.deepcopy(_whole(pipeline, optimizer))
    pipeline.detach()
    after_fit = _checkpoint(model, _sharded(pipeline, optimizer))
    save(folder / "after", after_fit)
    optimizer = optimizer_for("adamw", model)
    optimizer.load_state_dict(whole)
    fresh = new_pipeline(model, optimizer)
    save(folder / "before", _checkpoint(model, _sharded(fresh, optimizer)))
    return copy.deepcopy(_checkpoint(model, whole))


def test_saving_after_training_and_before_the_first_step(tmp_path: Path) -> None:
    ordinary = run_ranks(_save_before_the_first_step, 2, tmp_path)[0]
    for name in ("after", "before"):
        assert_equal(load(tmp_path / name), ordinary)


def _save_what_was_just_loaded(folder: Path) -> dict[str, Any]:
    model = build("mlp")
    optimizer = optimizer_for("adamw", model)
    pipeline = new_pipeline(model, optimizer)
    train_steps(pipeline, model, range(2))
    earlier = copy.deepcopy(_whole(pipeline, optimizer))
    train_steps(pipeline, model, range(2, 4))
    optimizer.load_state_dict(earlier)
    save(folder, _checkpoint(model, _sharded(pipeline, optimizer)))
    return copy.deepcopy(_checkpoint(model, earlier))


def test_saving_what_was_just_loaded(tmp_path: Path) -> None:
    ordinary = run_ranks(_save_what_was_just_loaded, 2, tmp_path / "saved")[0]
    assert_equal(load(tmp_path / "saved"), ordinary)


# What else stands in a checkpoint.


def test_what_is_no_parameter_comes_back_as_it_was(tmp_path: Path) -> None:
    large = torch.randn(40, 50)
    states = OrderedDict(weight=large, alias=large, turned=large.t())
    states._metadata = OrderedDict(version=2)  # type: ignore[attr-defined]
    checkpoint = {
        "state_dict": states,
        "a": {"b": large + 1},
        "a.b": large + 2,
        "nested": [(large[:, ::2], 3, None), "text", {7: torch.tensor(1.5)}],
        "small_view": large[0, :3],
        "half": torch.randn(800).half(),
        "flags": torch.arange(5000) % 3 == 0,
        "empty": torch.empty(0, 3),
    }
    save(tmp_path / "saved", checkpoint)
    loaded = load(tmp_path / "saved")
    assert loaded["state_dict"]._metadata == {"version": 2}
    assert loaded["state_dict"]["alias"] is loaded["state_dict"]["weight"]
    checkpoint["nested"][0] = (large[:, ::2].clone(), 3, None)  # Gaps are not kept.
    assert_equal(loaded, checkpoint)
    assert states["weight"] is large
    skeleton = tmp_path / "saved" / distributed_checkpoint.SKELETON_FILE
    assert skeleton.stat().st_size < large.nbytes


def test_taking_apart_changes_nothing_and_is_undone() -> None:
    checkpoint = {"x": [torch.randn(600), {"y": torch.randn(700)}]}
    before = copy.deepcopy(checkpoint)
    skeleton, stored = take_apart(checkpoint)
    assert sorted(stored) == ["x.0", "x.1.y"]
    assert_equal(checkpoint, before)
    tensors = {name: one.chunks[0].values for name, one in stored.items()}
    assert_equal(put_together(skeleton, tensors), before)


def test_a_tensor_without_data_is_refused() -> None:
    with pytest.raises(ValueError, match=r"checkpoint\['callbacks.x'\] is a tensor without data"):
        take_apart({"callbacks": {"x": torch.empty(3, device="meta")}})


def test_long_tensors_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_storage, "MAX_CHUNK_NUMEL", 300)
    value = torch.randn(1000)
    save(tmp_path / "saved", {"value": value})
    assert torch.equal(load(tmp_path / "saved")["value"], value)
    stored = FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata["value"]
    assert [chunk.sizes[0] for chunk in stored.chunks] == [300, 300, 300, 100]


def _save_what_ranks_have_differently(folder: Path) -> None:
    model = build("conv")
    optimizer = optimizer_for("adamw", model)
    pipeline = new_pipeline(model, optimizer)
    train_steps(pipeline, model, range(1), "conv")
    checkpoint = _checkpoint(model, _sharded(pipeline, optimizer))
    checkpoint["noise"] = torch.full((5000,), float(dist.get_rank()))
    if dist.get_rank():
        checkpoint["only here"] = torch.ones(5000)
    save(folder, checkpoint)


def test_what_ranks_have_differently_is_rank_0s(tmp_path: Path) -> None:
    run_ranks(_save_what_ranks_have_differently, 3, tmp_path / "saved")
    loaded = load(tmp_path / "saved")
    assert torch.equal(loaded["noise"], torch.zeros(5000))
    assert "only here" not in loaded


# Ordinary files.


@pytest.mark.slow
def test_the_command_makes_an_ordinary_file(tmp_path: Path) -> None:
    folder, file = tmp_path / "saved", tmp_path / "ordinary.ckpt"
    ordinary = run_ranks(_train_and_save, 2, folder, "gpt", "adamw")[0]
    command = [sys.executable, "-m", "lightning_dear.checkpoint.folder", folder, file]
    subprocess.run(command, check=True)
    loaded = torch.load(file, weights_only=True)
    assert_equal(loaded, ordinary)
    model = build("gpt", seed=1)
    optimizer = optimizer_for("adamw", model)
    model.load_state_dict(loaded["state_dict"])
    optimizer.load_state_dict(loaded["optimizer_states"][0])
    assert len(optimizer.state) == len(list(model.parameters()))
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 1
    assert "exists already. Remove it" in again.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ordinary.ckpt", "saved"]


# Interruptions.


def _save_again(folder: Path, value: float) -> None:
    save(folder, {"value": torch.full((5000,), value)})


def _value(folder: Path) -> float:
    return float(load(folder)["value"][0])


def _interrupt(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, when: Callable[..., bool]
) -> None:
    original = getattr(owner, name)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if when(*args):
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, interrupted)


INTERRUPTIONS: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "writing": (torch, "save", lambda *_: True),
    "metadata": (pickle, "dump", lambda *_: True),
    "finishing": (checkpoint_files, "write", lambda *_: True),
    "publishing": (distributed_checkpoint, "_publish", lambda *_: True),
    "first rename": (Path, "rename", lambda path, to: "replaced" in str(to)),
    "second rename": (Path, "rename", lambda path, to: to.name == "saved"),
}


@pytest.mark.parametrize("where", sorted(INTERRUPTIONS))
@pytest.mark.parametrize("has_earlier", [False, True])
def test_an_interrupted_save_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, has_earlier: bool
) -> None:
    if not has_earlier and where == "first rename":
        pytest.skip("nothing is replaced")
    folder = tmp_path / "saved"
    if has_earlier:
        _save_again(folder, 1.0)
    with monkeypatch.context() as patch:
        _interrupt(patch, *INTERRUPTIONS[where])
        with pytest.raises(BaseException):  # noqa: B017, PT011
            _save_again(folder, 2.0)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if has_earlier:
            assert is_folder(folder)
            assert _value(folder) == 1.0
        else:
            assert not is_folder(folder)
    was_between = has_earlier and where == "second rename"
    assert ["was being replaced" in str(one.message) for one in warned] == [True] * was_between
    # What is left is not taken for a last checkpoint, and the next save clears it away.
    assert all("last" not in path.name for path in tmp_path.iterdir())
    for left in tmp_path.glob(".saving-*"):
        (left / "stray").touch()
    _save_again(folder, 3.0)
    assert _value(folder) == 3.0
    assert not (folder / "stray").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_what_is_left_is_cleared_away_without_the_folder(tmp_path: Path) -> None:
    """Other ranks may be making it: they would find it gone in between."""
    (tmp_path / "stray").touch()
    (tmp_path / "strays" / "more").mkdir(parents=True)
    writer = checkpoint_storage._Writer(tmp_path, lambda tag: None, tmp_path)
    # While it is open no other folder gets its number.
    handle = os.open(tmp_path, os.O_RDONLY)
    writer.set_up_storage_writer(True)
    assert tmp_path.stat().st_ino == os.fstat(handle).st_ino
    assert not list(tmp_path.iterdir())
    os.close(handle)


def _die_while_writing(folder: Path, rank: int) -> None:
    _save_again(folder, 1.0)
    dist.barrier()
    if dist.get_rank() == rank:
        checkpoint_storage._SavePlanner.resolve_data = (  # type: ignore[method-assign]
            lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        )
    model = build("mlp")
    optimizer = optimizer_for("adamw", model)
    pipeline = new_pipeline(model, optimizer)
    train_steps(pipeline, model, range(1))
    save(folder, _checkpoint(model, _sharded(pipeline, optimizer)))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_while_it_writes_leaves_the_earlier_one(tmp_path: Path, rank: int) -> None:
    with pytest.raises(RanksFailed):
        run_ranks(_die_while_writing, 2, tmp_path / "saved", rank, timeout_s=30)
    assert _value(tmp_path / "saved") == 1.0


def _raise_while_writing(folder: Path) -> None:
    def fail(*_: Any) -> None:
        raise OSError("disk is full")

    if dist.get_rank() == 1:
        checkpoint_storage._SavePlanner.resolve_data = fail  # type: ignore[method-assign]
    model = build("mlp")
    optimizer = optimizer_for("adamw", model)
    pipeline = new_pipeline(model, optimizer)
    train_steps(pipeline, model, range(1))
    save(folder, _checkpoint(model, _sharded(pipeline, optimizer)))


def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    outcomes = observe_ranks(_raise_while_writing, 2, tmp_path / "saved", timeout_s=30)
    assert all("disk is full" in str(outcome) for outcome in outcomes)
    assert not is_folder(tmp_path / "saved")


def _save_to_a_folder_of_its_own(folder: Path) -> None:
    os.chdir(folder / str(dist.get_rank()))
    model = build("mlp")
    optimizer = optimizer_for("adamw", model)
    pipeline = new_pipeline(model, optimizer)
    train_steps(pipeline, model, range(1))
    save("saved", _checkpoint(model, _sharded(pipeline, optimizer)))


def test_a_folder_that_hosts_do_not_share_is_refused(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    with pytest.raises(RanksFailed, match="all hosts share"):
        run_ranks(_save_to_a_folder_of_its_own, 2, tmp_path)
    assert not is_folder(tmp_path / "0" / "saved")


# Replacing, removing, refusing.


def test_replacing_a_file_and_a_link(tmp_path: Path) -> None:
    target = tmp_path / "saved"
    target.write_text("an ordinary checkpoint")
    _save_again(target, 1.0)
    assert _value(target) == 1.0
    link = tmp_path / "link"
    link.symlink_to("saved")
    assert is_folder(link)
    _save_again(link, 2.0)
    assert (_value(target), _value(link)) == (1.0, 2.0)


@pytest.mark.parametrize("way", ["folder", "file"])
def test_a_directory_with_other_files_stays(way: str, tmp_path: Path) -> None:
    target = tmp_path / "results"
    target.mkdir()
    (target / "notes.csv").write_text("a day's work")
    wanted: Any = pytest.raises((IsADirectoryError, CheckpointException), match=r"notes\.csv")
    with wanted, making_way(target) if way == "file" else nullcontext():
        _save_again(target, 1.0)
    assert (target / "notes.csv").read_text() == "a day's work"
    assert [*tmp_path.iterdir()] == [target]


def test_a_file_that_cannot_be_written_leaves_the_folder(tmp_path: Path) -> None:
    target = tmp_path / "saved"
    _save_again(target, 1.0)
    with pytest.raises(OSError, match="no space"), making_way(target):
        raise OSError("no space")
    with pytest.warns(UserWarning, match="is loaded instead"):
        assert _value(target) == 1.0
    with making_way(target):
        target.write_text("an ordinary checkpoint")
    assert [*tmp_path.iterdir()] == [target]


def test_removing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, link = tmp_path / "saved", tmp_path / "link"
    _save_again(target, 1.0)
    link.symlink_to("saved")
    remove(link)
    assert not link.exists()
    assert _value(target) == 1.0
    with monkeypatch.context() as patch:
        _interrupt(patch, checkpoint_files.shutil, "rmtree", lambda *_: True)
        with pytest.raises(KeyboardInterrupt):
            remove(target)
    with pytest.raises(ValueError, match="not a complete checkpoint folder"):
        load(target)
    remove(target)
    assert list(tmp_path.iterdir()) == []


def test_remote_paths_are_refused() -> None:
    with pytest.raises(ValueError, match="not at 's3://bucket/x'"):
        save("s3://bucket/x", {})
    assert not is_folder("s3://bucket/x")


def test_what_is_not_there_or_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        load(tmp_path / "saved")
    _save_again(tmp_path / "saved", 1.0)
    (file,) = (tmp_path / "saved").glob("__*")
    os.truncate(file, file.stat().st_size - 1000)
    with pytest.raises(ValueError, match="missing or cut off"):
        load(tmp_path / "saved")
    file.unlink()
    with pytest.raises(ValueError, match="missing or cut off"):
        load(tmp_path / "saved")


def test_elements_that_nobody_wrote_are_not_made_up(tmp_path: Path) -> None:
    _save_again(tmp_path / "saved", 1.0)
    longer = {"value": torch.empty(6000, device="meta")}
    skeleton = torch.load(tmp_path / "saved" / distributed_checkpoint.SKELETON_FILE)
    with pytest.raises(ValueError, match="holds 5000 of the 6000 elements of 'value'"):
        checkpoint_storage.read_tensors(tmp_path / "saved", longer, skeleton["places"], True)


def test_an_unknown_format_is_refused_by_name(tmp_path: Path) -> None:
    _save_again(tmp_path / "saved", 1.0)
    path = tmp_path / "saved" / distributed_checkpoint.SKELETON_FILE
    torch.save({**torch.load(path), CHECKPOINT_KEY: {"format": 99}}, path)
    with pytest.raises(ValueError, match="lightning_dear format 99"):
        load(tmp_path / "saved")


class _Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("was run",)


def test_loading_runs_no_code_from_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _save_again(tmp_path / "saved", 1.0)
    torch.save(_Evil(), tmp_path / "saved" / distributed_checkpoint.SKELETON_FILE)
    with pytest.raises((ValueError, pickle.UnpicklingError)):
        load(tmp_path / "saved")
    assert not (tmp_path / "was run").exists()


def test_converting_needs_leave_to_run_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "saved", {"value": torch.ones(5000), "path": tmp_path})
    with pytest.raises(pickle.UnpicklingError):
        convert(tmp_path / "saved", tmp_path / "file")
    with pytest.raises(SystemExit):
        distributed_checkpoint.main([str(tmp_path / "saved"), str(tmp_path / "file")])
    assert "checkpoint.pt: Weights only load failed" in capsys.readouterr().err
    convert(tmp_path / "saved", tmp_path / "file", weights_only=False)
    assert torch.load(tmp_path / "file", weights_only=False)["path"] == tmp_path
