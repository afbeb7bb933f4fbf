"""Data modules over digits, source text and images; the strategy shares each out to processes."""

import hashlib
import sysconfig
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_dear.names import need

NUM_PIXELS = 8
MAX_GREY = 16.0

EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)
NUM_HASH_CLASSES = 20

# Means and deviations of the colour channels of ImageNet's training images.
_IMAGENET_STATISTICS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(kw_only=True, eq=False, repr=False)
class SplitDataModule(LightningDataModule):
    """Loaders over ``train_set``, ``val_set`` and ``test_set``, which subclasses ``load``.

    Lightning adds the distributed sampler. Where a split does not divide by the number of
    processes, that sampler repeats a few items, which moves a metric by less than one item per
    process.

    Args:
        batch_size: Items per batch and process.
        num_workers: Loader processes per training process; 0 loads in the training process.
    """

    batch_size: int
    num_workers: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        self.train_set: Any = None
        self.val_set: Any = None
        self.test_set: Any = None

    @abstractmethod
    def load(self) -> Sequence[Any]:
        """Return what to train on, to validate with and to test with."""

    def setup(self, stage: str) -> None:
        """Load the sets, once; called on every process."""
        if self.train_set is None:
            self.train_set, self.val_set, self.test_set = self.load()

    def train_dataloader(self) -> DataLoader[Any]:
        """Return shuffled batches; an incomplete last batch is dropped, as BatchNorm prefers."""
        return self._loader(self.train_set, is_training=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return the validation batches in order."""
        return self._loader(self.val_set, is_training=False)

    def test_dataloader(self) -> DataLoader[Any]:
        """Return the test batches in order."""
        return self._loader(self.test_set, is_training=False)

    def _loader(self, dataset: Any, is_training: bool) -> DataLoader[Any]:
        if dataset is None:
            raise RuntimeError("Call setup() before asking for a loader; a Trainer does so.")
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            shuffle=is_training,
            drop_last=is_training,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )


@dataclass(kw_only=True, eq=False, repr=False)
class DigitsDataModule(SplitDataModule):
    """Handwritten digits as they come with scikit-learn: real data, no download.

    1,797 images of shape (1, 8, 8) in [0, 1], split by class with a seed.

    Args:
        batch_size: Images per batch and process.
        val_size: Images held out for validation.
        test_size: Images held out for the test.
        split_seed: Seed of the split; apart from the run's seed, so that runs stay comparable.
        num_workers: Loader processes; the data lies in memory, so 0 is fastest.

    Raises:
        ModuleNotFoundError: If scikit-learn is missing, which the extra `apps` brings.
    """

    batch_size: int = 32
    val_size: int = 240
    test_size: int = 360
    split_seed: int = 0

    def __post_init__(self) -> None:
        need("data=digits", "sklearn")
        super().__post_init__()

    def load(self) -> Sequence[TensorDataset]:
        """Return the images and their labels, int64."""
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        pixels, labels = load_digits(return_X_y=True)
        shape = (-1, 1, NUM_PIXELS, NUM_PIXELS)
        images = torch.as_tensor(pixels, dtype=torch.float32).div(MAX_GREY).view(shape)
        digits = TensorDataset(images, torch.as_tensor(labels, dtype=torch.int64))
        split = partial(train_test_split, random_state=self.split_seed)
        rest, test = split(range(len(digits)), test_size=self.test_size, stratify=labels)
        train, val = split(rest, test_size=self.val_size, stratify=labels[rest])
        return [TensorDataset(*digits[part]) for part in (train, val, test)]


@dataclass(kw_only=True, eq=False, repr=False)
class SourceCorpusDataModule(SplitDataModule):
    """The Python standard library's own source: real text, no download.

    Windows of ``context_length + 1`` bytes. Whole files are held out, chosen by their hash: one in
    20 goes to validation, one in 20 to the test, whatever the machine.

    Args:
        batch_size: Windows per batch and process.
        context_length: Bytes the model sees; a window holds one more, the last target.
        num_eval_windows: Windows for validation and for the test, spread evenly over the files.
        root: Folder of ``.py`` files; None takes the running Python's standard library.
        num_workers: Loader processes; the corpus lies in memory, so 0 is fastest.
    """

    batch_size: int = 8
    context_length: int = 128
    num_eval_windows: int = 512
    root: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("context_length", "num_eval_windows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")

    def load(self) -> Sequence[Tensor]:
        """Return windows of the files (about 15 MB).

        Raises:
            FileNotFoundError: A split has no file.
        """
        root = Path(self.root or sysconfig.get_path("stdlib"))
        splits: dict[str, list[Path]] = {"train": [], "val": [], "test": []}
        for path in source_files(root):
            splits[split_of(path.relative_to(root).as_posix())].append(path)
        if empty := [name for name, paths in splits.items() if not paths]:
            raise FileNotFoundError(
                f"{root} has no .py files for the split(s) {', '.join(empty)}: set data.root=... "
                "to a folder with at least a hundred Python files."
            )
        train, val, test = (windows_of(paths, self.context_length) for paths in splits.values())
        return train, self._spread(val), self._spread(test)

    def _spread(self, windows: Tensor) -> Tensor:
        count = min(self.num_eval_windows, len(windows))
        return windows[torch.arange(count) * len(windows) // count]


@dataclass(kw_only=True, eq=False, repr=False)
class ImageFolderDataModule(SplitDataModule):
    """Images in ``root/train/<class>/`` and ``root/val/<class>/``, as ImageNet is laid out.

    Needs the extra ``[vision]``. ImageNet's test labels are not public, so ``val`` serves for the
    test as well.

    Args:
        root: Folder with ``train`` and ``val``.
        batch_size: Images per batch and process.
        image_size: Pixels per side after cropping.
        num_workers: Loader processes per training process.
    """

    root: str
    batch_size: int = 32
    image_size: int = 224
    num_workers: int = 4

    def load(self) -> Sequence[Any]:
        """List the images.

        Raises:
            FileNotFoundError: If ``root`` has no ``train`` or no ``val``.
        """
        val_set = self._open("val")
        return self._open("train"), val_set, val_set

    def _open(self, split: str) -> Any:
        folder = Path(self.root) / split
        if not folder.is_dir():
            raise FileNotFoundError(
                f"{folder} does not exist: set data.root=... to a folder with train/<class>/ and "
                "val/<class>/."
            )
        need("data=imagenet", "torchvision", extra="vision")
        from torchvision import datasets, transforms

        size = self.image_size
        if split == "train":
            crop = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
        else:
            # The usual margin: 256 pixels for a crop of 224.
            crop = [transforms.Resize(size * 8 // 7), transforms.CenterCrop(size)]
        tail = [transforms.ToTensor(), transforms.Normalize(*_IMAGENET_STATISTICS)]
        return datasets.ImageFolder(str(folder), transforms.Compose([*crop, *tail]))


def windows_of(paths: list[Path], context_length: int) -> Tensor:
    """Return all windows of the files' bytes (uint8), whose targets do not overlap, as one view.

    Raises:
        ValueError: If there are fewer bytes than one window has.
    """
    text = bytearray().join(path.read_bytes() for path in paths)
    if len(text) <= context_length:
        raise ValueError(
            f"The text has {len(text)} bytes, less than one window of {context_length + 1}: "
            "give more text or a smaller data.context_length."
        )
    return torch.frombuffer(text, dtype=torch.uint8).unfold(0, context_length + 1, context_length)


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
