"""The metadata of a checkpoint folder is data: whatever a stranger writes there, nothing is run."""

from __future__ import annotations

import copyreg
import io
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata

from lightning_dear.checkpoint.files import METADATA_FILE
from lightning_dear.checkpoint.folder import SKELETON_FILE, load, save

MODULE = metadata.__name__
RECORDS = (
    *("Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "MetadataIndex"),
    *("TensorProperties", "StorageMeta"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "saved", {"state_dict": {"w": torch.arange(3000.0)}, "global_step": 1})
    return tmp_path / "saved"


def text(said: str) -> bytes:
    return pickle.BINUNICODE + len(said.encode()).to_bytes(4, "little") + said.encode()


def name(of: str, module: str = MODULE) -> bytes:
    return text(module) + text(of) + pickle.STACK_GLOBAL


def old_name(of: str, module: str = MODULE) -> bytes:
    return pickle.GLOBAL + f"{module}\n{of}\n".encode()


def state(**entries: bytes) -> bytes:
    pairs = b"".join(text(key) + value + pickle.SETITEM for key, value in entries.items())
    return pickle.EMPTY_DICT + pairs


def replaced_attributes(named: Callable[..., bytes]) -> bytes:
    """Of the torch module, through the module of the records, which imports it."""
    attributes = state(manual_seed=pickle.NONE, load=named("dataclass"))
    return named("torch") + attributes + pickle.BUILD + pickle.POP


def code_in_a_field(named: Callable[..., bytes]) -> bytes:
    """A dataclass whose generated __init__ has code in it, in the name of a field."""
    code = "a,*,b=__import__('os').mkdir('was run')"
    options = state(init=pickle.NEWFALSE, repr=pickle.NEWFALSE, compare=pickle.NEWFALSE)
    field = named("field") + b")R" + b"N" + options + pickle.TUPLE2 + pickle.BUILD
    hints = state(__annotations__=state(**{code: named("Metadata")}), **{code: field})
    kind = named("StorageMeta") + b"N" + hints + pickle.TUPLE2 + pickle.BUILD
    return named("dataclass") + kind + pickle.TUPLE1 + pickle.REDUCE


def called(function: bytes, *given: bytes) -> bytes:
    return function + b"(" + b"".join(given) + pickle.TUPLE + pickle.REDUCE


MKDIR = text("was run")


def with_much(made: bytes) -> bytes:
    """Makes something of a long list, again and again."""
    much = b"](" + b"N" * 10**5 + b"e" + pickle.MEMOIZE
    return much + name("Size", "torch") + pickle.MEMOIZE + (b"h\1h\0" + made) * 10**5


HOSTILE: dict[str, bytes] = {
    "attributes of torch": replaced_attributes(old_name),
    "attributes of torch, protocol 4": replaced_attributes(name),
    "code in a field": code_in_a_field(old_name),
    "code in a field, protocol 4": code_in_a_field(name),
    "a call": called(name("mkdir", os.mkdir.__module__), MKDIR),
    "a call, protocol 2": called(old_name("mkdir", os.mkdir.__module__), MKDIR),
    "an instance": b"(" + MKDIR + b"i" + f"{os.mkdir.__module__}\nmkdir\n".encode(),
    "an object": b"(" + name("mkdir", os.mkdir.__module__) + MKDIR + pickle.OBJ,
    "a dotted name": called(name("os.mkdir"), MKDIR),
    "a dotted record": called(name("Metadata.__init__"), MKDIR),
    "dots in the module": called(name("mkdir", f"{MODULE}.os"), MKDIR),
    "a chain of getattr": called(
        called(name("getattr", "builtins"), name("Metadata"), text("__init__")), MKDIR
    ),
    "eval": called(name("eval", "builtins"), text("__import__('os').mkdir('was run')")),
    "copyreg": called(name("_reconstructor", "copyreg"), name("Metadata"), b"N", b"N"),
    "a module of ours": called(name("load", "lightning_dear.checkpoint.folder"), text("x")),
    "another function of torch": called(name("load", "torch"), text("x")),
    "a record as a class": name("Metadata") + state(__init__=name("Size", "torch")) + b"b",
    "slots of a class": name("Metadata") + b"N" + state(load=b"N") + pickle.TUPLE2 + b"b",
    "a text as a class": called(text("x"), MKDIR),
    "no arguments": name("Size", "torch") + pickle.NONE + pickle.REDUCE,
    "new of a text": text("x") + pickle.EMPTY_TUPLE + pickle.NEWOBJ,
    "state of a text": text("x") + state(y=b"N") + pickle.BUILD,
    "a persistent id": text("x") + pickle.BINPERSID,
    "an extension": pickle.EXT1 + b"\x01",
    "a large memo": pickle.NONE + pickle.LONG_BINPUT + b"\xff\xff\xff\x7f",
    "a large text": pickle.BINUNICODE8 + (1 << 60).to_bytes(8, "little"),
    "large bytes": pickle.BYTEARRAY8 + (1 << 60).to_bytes(8, "little"),
    "a large frame": pickle.FRAME + (1 << 60).to_bytes(8, "little"),
    "a deep key": state() + pickle.NONE + pickle.TUPLE1 * 10**5 + pickle.NONE + pickle.SETITEM,
    "a branching key": state()
    + (pickle.NONE + (pickle.MEMOIZE + pickle.BINGET + b"%c" + pickle.TUPLE2) * 60)
    % tuple(range(60))
    + pickle.NONE
    + pickle.SETITEM,
    # Copies of copies: what is short may get long.
    "a record of itself": state() + pickle.MEMOIZE + b"h\0h\0b" * 60,
    "many calls with much": with_much(pickle.REDUCE),
    "much that is made": with_much(pickle.NEWOBJ),
    "no end": name("Metadata")[:-3],
}


def extended() -> Iterator[None]:
    """Someone has registered a function for pickles, and has unpickled it before."""
    copyreg.add_extension(os.mkdir.__module__, "mkdir", 1)
    try:
        pickle.loads(pickle.PROTO + b"\x02" + pickle.EXT1 + b"\x01.")
        yield
    finally:
        copyreg.remove_extension(os.mkdir.__module__, "mkdir", 1)


def _assert_names(error: ValueError, folder: Path) -> None:
    assert str(folder) in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize("what", HOSTILE)
def test_nothing_of_it_is_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, what: str, request: pytest.FixtureRequest
) -> None:
    if "extension" in what:
        guard = extended()
        next(guard)
        request.addfinalizer(lambda: next(guard, None))
    monkeypatch.chdir(folder.parent)
    honest = (folder / METADATA_FILE).read_bytes()
    before = [vars(module).copy() for module in (torch, metadata, filesystem, os)]
    before += [dict(vars(getattr(metadata, record))) for record in RECORDS]
    for end in (b".", pickle.POP + honest[2:], honest[2:]):
        (folder / METADATA_FILE).write_bytes(pickle.PROTO + b"\x04" + HOSTILE[what] + end)
        try:
            loaded = load(folder, weights_only=True)
        except ValueError as error:
            _assert_names(error, folder)
        else:
            # What is read as data may lie below what is honest: nobody looks at it there.
            assert end == honest[2:]
            assert loaded["global_step"] == 1
    after = [vars(module).copy() for module in (torch, metadata, filesystem, os)]
    after += [dict(vars(getattr(metadata, record))) for record in RECORDS]
    assert after == before
    assert os.listdir() == ["saved"]


def test_only_these_names_are_known(folder: Path) -> None:
    """Of all that the modules hold in which the records stand."""
    skipped = {*RECORDS, "_MEM_FORMAT_ENCODING", "_StorageInfo", "Size"}
    for module in (metadata, filesystem, torch.serialization, torch):
        others = [of for of, value in vars(module).items() if not isinstance(value, torch.dtype)]
        for of in others[:: 10 if module is torch else 1]:
            if of in skipped or of == "_get_layout":
                continue
            pickled = called(name(of, module.__name__), text("x"))
            (folder / METADATA_FILE).write_bytes(pickle.PROTO + b"\x04" + pickled + b".")
            with pytest.raises(ValueError, match=f"names {module.__name__}.{of}: do not trust"):
                load(folder)


# What is honest.


def rewrite(folder: Path, change: Callable[[Any], None], pickler: Any = pickle.Pickler) -> None:
    """Changes the metadata as torch reads it."""
    known = pickle.loads((folder / METADATA_FILE).read_bytes())
    change(known)
    pickled = io.BytesIO()
    pickler(pickled).dump(known)
    (folder / METADATA_FILE).write_bytes(pickled.getvalue())


FORGED = "x\nRank 1: \x1b[2Jfine"
ELSEWHERE = ["../outside", "/dev/zero", "checkpoint.pt/../../outside", ".", FORGED]


@pytest.mark.parametrize("path", ELSEWHERE)
def test_files_elsewhere_are_not_read(folder: Path, path: str) -> None:
    (part,) = folder.glob("__*")
    (folder.parent / "outside").write_bytes(part.read_bytes())

    def change(known: Any) -> None:
        for info in known.storage_data.values():
            info.relative_path = path

    rewrite(folder, change)
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


class Early(pickle.Pickler):
    """Pickles members of enums as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, one: Any) -> Any:
        if isinstance(one, metadata._MEM_FORMAT_ENCODING):
            return getattr, (type(one), one.name)
        return NotImplemented


@pytest.mark.parametrize("pickler", [pickle.Pickler, Early])
def test_folders_of_earlier_versions_are_read(folder: Path, pickler: Any) -> None:
    """Their files had the same names in every save, and they did not say which save it was."""
    (part,) = folder.glob("__*")
    part.rename(folder / "__0_0.distcp")

    def change(known: Any) -> None:
        for info in known.storage_data.values():
            info.relative_path = "__0_0.distcp"

    rewrite(folder, change, pickler)
    skeleton = torch.load(folder / SKELETON_FILE)
    del skeleton["tag"]
    torch.save(skeleton, folder / SKELETON_FILE)
    assert torch.equal(load(folder)["state_dict"]["w"], torch.arange(3000.0))


def test_torch_reads_our_folders(folder: Path) -> None:
    read = {"state_dict.w": torch.zeros(3000)}
    dcp.load(read, checkpoint_id=folder, no_dist=True)
    assert torch.equal(read["state_dict.w"], torch.arange(3000.0))
