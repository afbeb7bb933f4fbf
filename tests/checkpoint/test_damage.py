"""Files and folders that are damaged, cut, empty or foreign are refused, by path."""

from __future__ import annotations

import pickle
import random
import re
import shutil
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dear.checkpoint.folder import SKELETON_FILE, load, save
from lightning_dear.strategy.checkpoint_io import AtomicCheckpointIO, checked
from tests.checkpoint.test_distributed_checkpoint import assert_equal


def checkpoint(seed: int = 0) -> dict[str, Any]:
    made = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(40, 30, generator=made) for name in ("net.a", "net.b")}
    return {
        "state_dict": {**weights, "tied": weights["net.a"], "bias": torch.ones(3)},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.randn(40, 30, generator=made)}}}],
        "global_step": 5,
        "hyper_parameters": {"rate": 0.001},
    }


def save_file(path: Path, content: dict[str, Any]) -> None:
    AtomicCheckpointIO().save_checkpoint(content, path)


def load_file(path: Path, *, check_digests: bool = True) -> dict[str, Any]:
    plain = partial(AtomicCheckpointIO().load_checkpoint, path, weights_only=True)
    return checked(plain, path, check_digests=check_digests)


KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "file": (save_file, load_file),
    "folder": (save, load),
}


def flip(path: Path, at: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def place_of(value: torch.Tensor, path: Path) -> int:
    """Where the bytes of `value` are in the file."""
    at = path.read_bytes().find(value.numpy().tobytes())
    assert at > 0
    return at


def file_of(path: Path, value: torch.Tensor) -> Path:
    if path.is_file():
        return path
    (part,) = path.glob("__*")
    return part if value.nbytes > 1024 else path / SKELETON_FILE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", ["net.a", "net.b", "bias"])
def test_a_flipped_bit_in_a_tensor_is_noticed(tmp_path: Path, kind: str, at: str) -> None:
    (write, read), path = KINDS[kind], tmp_path / "saved"
    write(path, checkpoint())
    value = checkpoint()["state_dict"][at]
    file = file_of(path, value)
    flip(file, place_of(value, file) + 5)
    with pytest.raises(ValueError, match="is damaged") as raised:
        read(path)
    assert str(file) in str(raised.value)
    record = re.search(r"is damaged: (.*) is not what", str(raised.value))
    assert record is not None
    assert record[1] == f"'state_dict.{at}'" or "/data/" in record[1]
    # The message names what lets go of that.
    assert "check_digests=False" in str(raised.value)
    damaged = read(path, check_digests=False)["state_dict"][at]
    assert int((damaged != value).sum()) == 1


def refusal(read: Callable[[Path], Any], path: Path) -> str | None:
    try:
        read(path)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_bit_is_flipped_all_comes_back_or_nothing(tmp_path: Path, kind: str) -> None:
    (write, read), path = KINDS[kind], tmp_path / "saved"
    write(path, checkpoint())
    whole, rng = read(path), random.Random(0)
    files = [path] if path.is_file() else sorted(path.iterdir())
    noticed = 0
    for file in files:
        before = file.read_bytes()
        # What is not tensors is near the ends.
        ends = sorted({*range(len(before))[:1500:3], *range(len(before))[-1500:]})
        for at in [*rng.sample(ends, min(len(ends), 300)), len(before) // 2]:
            flip(file, at, rng.randrange(8))
            said = refusal(read, path)
            assert said is None or (str(path) in said and len(said.splitlines()) == 1)
            if said is None:
                assert_equal(read(path), whole)
            noticed += said is not None
            file.write_bytes(before)
    assert noticed > 100


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_that_says_it_is_a_folder_is_refused(tmp_path: Path, kind: str) -> None:
    """torch would leave whatever is in memory in the place of its numbers."""
    (write, read), path = KINDS[kind], tmp_path / "saved"
    write(path, checkpoint())
    files = [path] if path.is_file() else [path / SKELETON_FILE, *path.glob("__*")]
    for file in files:
        before = file.read_bytes()
        entries = [found.start() for found in re.finditer(b"PK\x01\x02", before)]
        assert len(entries) > 3
        for at in entries:
            # The attributes of MS-DOS in the archive's directory.
            flip(file, at + 38, 4)
            assert f"{file} is damaged" in str(refusal(read, path))
            file.write_bytes(before)


def test_what_states_no_digests_loads(tmp_path: Path) -> None:
    """As torch writes it where it is told not to compute any, and as torch before 1.6 has."""
    torch.save(checkpoint(), tmp_path / "old", _use_new_zipfile_serialization=False)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(checkpoint(), tmp_path / "file")
        save(tmp_path / "folder", checkpoint())
    finally:
        torch.serialization.set_crc32_options(True)
    for name, read in (("old", load_file), ("file", load_file), ("folder", load)):
        assert_equal(read(tmp_path / name), checkpoint())


def test_what_another_strategy_wrote_is_checked_too(tmp_path: Path) -> None:
    torch.save(checkpoint(), tmp_path / "theirs")
    value = checkpoint()["state_dict"]["net.b"]
    flip(tmp_path / "theirs", place_of(value, tmp_path / "theirs"))
    with pytest.raises(ValueError, match=r"/data/\d+ is not what was written"):
        load_file(tmp_path / "theirs")


@pytest.mark.parametrize("which", ["part", SKELETON_FILE])
def test_a_folder_of_two_checkpoints_is_refused(tmp_path: Path, which: str) -> None:
    """As when copying one over the other has broken off. All their files are as long."""
    for name, seed in (("first", 0), ("second", 1)):
        save(tmp_path / name, checkpoint(seed))
    first, mixed = tmp_path / "first", tmp_path / "second"
    if which == "part":
        for part in mixed.glob("__*"):
            part.unlink()
        for part in first.glob("__*"):
            shutil.copy(part, mixed)
    else:
        shutil.copy(first / SKELETON_FILE, mixed)
    with pytest.raises(ValueError, match="missing or cut off, or checkpoint.pt is not of this"):
        load(mixed)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


def text(path: Path) -> None:
    path.write_text("epoch,loss\n0,1.5\n" * 50)


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def another_archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("word/document.xml", "<w/>")


def a_list(path: Path) -> None:
    with path.open("wb") as file:
        torch.save([1, 2], file)


def a_tensor(path: Path) -> None:
    with path.open("wb") as file:
        torch.save(torch.ones(3), file)


def plain_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"state_dict": {}}))


DAMAGE: dict[str, Callable[[Path], None]] = {
    "empty": empty,
    **{f"cut at {share}": partial(cut, share=share) for share in (0.02, 0.3, 0.7, 0.99, 0.9999)},
    **{one.__name__: one for one in (text, zeros, another_archive, a_list, a_tensor, plain_pickle)},
}


@pytest.mark.parametrize("what", DAMAGE)
@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("file", ["file", SKELETON_FILE, "part"])
def test_a_damaged_or_foreign_file_is_named_in_one_sentence(
    tmp_path: Path, file: str, what: str, checks: bool
) -> None:
    kind = "file" if file == "file" else "folder"
    (write, read), path = KINDS[kind], tmp_path / "saved"
    write(path, checkpoint())
    damaged = path if file == "file" else path / file
    if file == "part":
        (damaged,) = path.glob("__*")
    DAMAGE[what](damaged)
    with pytest.raises(ValueError, match=str(path)) as raised:
        read(path, check_digests=checks)
    said = str(raised.value)
    assert len(said.splitlines()) == 1
    # Who does as torch says here runs what is in the file.
    assert "Re-running" not in said


@pytest.mark.parametrize("kind", KINDS)
def test_what_names_code_is_refused_by_path(tmp_path: Path, kind: str) -> None:
    (write, read), path = KINDS[kind], tmp_path / "saved"
    write(path, {**checkpoint(), "path": tmp_path})
    with pytest.raises(pickle.UnpicklingError, match=f"{path}.*: Weights only load failed"):
        read(path, weights_only=True) if kind == "folder" else read(path)


def test_what_is_not_there_is_still_told_apart(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="saved"):
        load_file(tmp_path / "saved")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"not a complete checkpoint folder \(.metadata is"):
        load(tmp_path / "empty")
