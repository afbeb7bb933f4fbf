"""The Python standard library's own source as a text corpus: real text, no download."""

import hashlib
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_dear.workloads.splits import SplitDataModule

EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)
NUM_HASH_CLASSES = 20


class SourceCorpusDataModule(SplitDataModule):
    """Windows of ``context_length + 1`` bytes; whole files are held out, chosen by their hash.

    One file in 20 goes to validation, one in 20 to the test, whatever the machine.

    Args:
        batch_size: Windows per batch and process.
        context_length: Bytes the model sees; a window holds one more, the last target.
        num_eval_windows: Windows for validation and for the test, spread evenly over the files.
        root: Folder of ``.py`` files; None takes the running Python's standard library.
        num_workers: Loader processes; the corpus lies in memory, so 0 is fastest.
    """

    def __init__(
        self,
        batch_size: int = 8,
        context_length: int = 128,
        num_eval_windows: int = 512,
        root: str | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, num_workers)
        if context_length < 1:
            raise ValueError(f"context_length must be at least 1, got {context_length}.")
        if num_eval_windows < 1:
            raise ValueError(f"num_eval_windows must be at least 1, got {num_eval_windows}.")
        self.context_length = context_length
        self.num_eval_windows = num_eval_windows
        self.root = root

    def setup(self, stage: str) -> None:
        """Read the files into memory (about 15 MB); called on every process."""
        if self.train_set is not None:
            return
        root = Path(self.root or sysconfig.get_path("stdlib"))
        splits: dict[str, list[Path]] = {"train": [], "val": [], "test": []}
        for path in source_files(root):
            splits[split_of(path.relative_to(root).as_posix())].append(path)
        empty = [name for name, paths in splits.items() if not paths]
        if empty:
            raise FileNotFoundError(
                f"{root} has no .py files for the split(s) {', '.join(empty)}: set data.root=... "
                "to a folder with at least a hundred Python files."
            )
        self.train_set = ByteWindows(_read(splits["train"]), self.context_length)
        self.val_set = self._eval_windows(splits["val"])
        self.test_set = self._eval_windows(splits["test"])

    def _eval_windows(self, paths: list[Path]) -> "ByteWindows":
        return ByteWindows(_read(paths), self.context_length, self.num_eval_windows)


class ByteWindows(Dataset[Tensor]):
    """Windows of ``context_length + 1`` bytes of ``text``, whose targets do not overlap.

    Args:
        text: All bytes, uint8.
        context_length: Bytes the model sees.
        max_windows: Keep this many, spread evenly; None keeps all.

    Raises:
        ValueError: If ``text`` is shorter than one window.
    """

    def __init__(self, text: Tensor, context_length: int, max_windows: int | None = None) -> None:
        available = (len(text) - 1) // context_length
        if available < 1:
            raise ValueError(
                f"The text has {len(text)} bytes, less than one window of {context_length + 1}: "
                "give more text or a smaller data.context_length."
            )
        self.text = text
        self.context_length = context_length
        count = available if max_windows is None else min(max_windows, available)
        self.starts = [index * available // count * context_length for index in range(count)]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        start = self.starts[index]
        return self.text[start : start + self.context_length + 1]


def source_files(root: Path) -> list[Path]:
    """Return the ``.py`` files under ``root`` in one order on every machine, without tests."""
    return sorted(
        path
        for path in root.rglob("*.py")
        if not EXCLUDED_FOLDERS.intersection(path.relative_to(root).parts)
    )


def split_of(name: str) -> str:
    """Return ``train``, ``val`` or ``test`` for a file, from a hash of its relative name."""
    digest = hashlib.sha256(name.encode()).digest()
    return {0: "val", 1: "test"}.get(digest[0] % NUM_HASH_CLASSES, "train")


def _read(paths: list[Path]) -> Tensor:
    text = bytearray().join(path.read_bytes() for path in paths)
    return torch.frombuffer(text, dtype=torch.uint8)
