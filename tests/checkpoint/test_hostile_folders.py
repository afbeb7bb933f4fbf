"""A checkpoint folder is data: whatever a stranger writes there, nothing is run."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lightning_dear.checkpoint.files import METADATA_FILE
from lightning_dear.checkpoint.folder import SKELETON_FILE, load, save

WEIGHT = torch.arange(3000.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "saved", {"state_dict": {"w": WEIGHT}, "global_step": 1})
    return tmp_path / "saved"


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("was run",)


def test_the_metadata_of_torch_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    (folder / METADATA_FILE).write_bytes(pickle.dumps(Evil()))
    assert torch.equal(load(folder, weights_only=True)["state_dict"]["w"], WEIGHT)
    assert os.listdir() == ["saved"]


FORGED = "x\nRank 1: \x1b[2Jfine"
ELSEWHERE = ["../outside", "/dev/zero", "checkpoint.pt/../../outside", ".", FORGED]


@pytest.mark.parametrize("path", ELSEWHERE)
def test_files_elsewhere_are_not_read(folder: Path, path: str) -> None:
    (part,) = folder.glob("__*")
    (folder.parent / "outside").write_bytes(part.read_bytes())
    skeleton = torch.load(folder / SKELETON_FILE)
    places = [(name, at, path, *where) for name, at, _, *where in skeleton["places"]]
    skeleton["places"] = places
    torch.save(skeleton, folder / SKELETON_FILE)
    with pytest.raises(ValueError, match="not of this checkpoint") as raised:
        load(folder)
    # Nobody is to take it for a line of a log, or for an order to the terminal.
    assert str(raised.value).isprintable()


@pytest.mark.parametrize("of", [METADATA_FILE, SKELETON_FILE])
def test_what_never_ends_is_not_read(folder: Path, of: str) -> None:
    (folder / of).unlink()
    (folder / of).symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=f"not a complete checkpoint folder \\({of} is"):
        load(folder)


@pytest.mark.parametrize("places", [7, [7], [("state_dict.w", 0)], [(None, {}, [], "x", "y")]])
def test_places_that_make_no_sense_are_refused(folder: Path, places: Any) -> None:
    torch.save({**torch.load(folder / SKELETON_FILE), "places": places}, folder / SKELETON_FILE)
    with pytest.raises(ValueError, match="cannot be loaded"):
        load(folder)


def test_folders_without_places_are_refused(folder: Path) -> None:
    skeleton = torch.load(folder / SKELETON_FILE)
    del skeleton["places"]
    torch.save(skeleton, folder / SKELETON_FILE)
    with pytest.raises(ValueError, match="cannot be loaded .KeyError: 'places'"):
        load(folder)


def test_torch_reads_our_folders(folder: Path) -> None:
    read = {"state_dict.w": torch.zeros(3000)}
    dcp.load(read, checkpoint_id=folder, no_dist=True)
    assert torch.equal(read["state_dict.w"], WEIGHT)
