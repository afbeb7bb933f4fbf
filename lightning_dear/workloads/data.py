"""Data modules over digits, source text and images; Lightning gives each rank its share."""

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
from torch.utils.data import DataLoader, TensorDataset

from lightning_dear.names import need

NUM_PIXELS = 8
MAX_GREY = 16.0

EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
NUM_HASH_CLASSES = 20

# Means and deviations of the colour channels of ImageNet's training images.
_IMAGENET_STATISTICS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(kw_only=True, eq=False, repr=False)
class SplitDataModule(LightningDataModule):
    """Loaders over ``train_set``, ``val_set`` and ``test_set``. A subclass loads these in ``load``.

    Lightning adds the distributed sampler. If the size of a split is no multiple of the number of
    ranks, that sampler repeats a few items, which changes a metric by less than one item per rank.

    Args:
        batch_size: Number of items in a batch of one rank.
        num_workers: Number of loader processes of each rank. 0 means loading in the rank itself.
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
        """Return the training, the validation and the test set."""

    def setup(self, stage: str) -> None:
        """Load the sets, once; called on every rank."""
        if self.train_set is None:
            self.train_set, self.val_set, self.test_set = self.load()

    def train_dataloader(self) -> DataLoader[Any]:
        """Return shuffled batches. A smaller last batch is dropped: BatchNorm needs many items."""
        return self._loader(self.train_set, is_training=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return the validation batches in order."""
        return self._loader(self.val_set, is_training=False)

    def test_dataloader(self) -> DataLoader[Any]:
        """Return the test batches in order."""
        return self._loader(self.test_set, is_training=False)

    def _loader(self, dataset: Any, is_training: bool) -> DataLoader[Any]:
        if dataset is None:
            raise RuntimeError("No data set is loaded. Call setup() first, as a Trainer does.")
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
        batch_size: Number of images in a batch of one rank.
        val_size: Number of images held out for validation.
        test_size: Number of images held out for the test.
        split_seed: Seed of the split. It differs from the run's seed, so that runs with different
            seeds have the same split.
        num_workers: Number of loader processes of each rank. The data is in memory, so 0 is
            fastest.

    Raises:
        ModuleNotFoundError: If scikit-learn is missing; the extra `apps` installs it.
    """

    batch_size: int = 32
    val_size: int = 240
    test_size: int = 360
    split_seed: int = 0

    def __post_init__(self) -> None:
        need("data=digits", "sklearn")
        super().__post_init__()

    def load(self) -> Sequence[TensorDataset]:
        """Return three data sets of images (fp32) and labels (int64)."""
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

    An item is a window of ``context_length + 1`` bytes. Whole files are held out: by a hash of its
    name, one file in 20 goes to validation and one in 20 to the test, the same on every machine.

    Args:
        batch_size: Number of windows in a batch of one rank.
        context_length: Number of bytes the model sees; a window has one more, the last target.
        num_eval_windows: Number of windows for validation, and for the test, spread evenly over
            the files.
        root: Folder of ``.py`` files. None means the running Python's standard library.
        num_workers: Number of loader processes of each rank. The corpus is in memory, so 0 is
            fastest.
    """

    batch_size: int = 8
    context_length: int = 128
    num_eval_windows: int = 512
    root: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("context_length", "num_eval_windows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not valid. Choose 1 or more.")

    def load(self) -> Sequence[torch.Tensor]:
        """Return windows of the files (about 15 MB).

        Raises:
            FileNotFoundError: If a split has no file.
        """
        root = Path(self.root or sysconfig.get_path("stdlib"))
        splits: dict[str, list[Path]] = {"train": [], "val": [], "test": []}
        for path in source_files(root):
            splits[split_of(path.relative_to(root).as_posix())].append(path)
        if empty := [name for name, paths in splits.items() if not paths]:
            raise FileNotFoundError(
                f"{root} has no .py files for the split(s) {', '.join(empty)}. Set data.root=..."
                " to a folder with at least a hundred Python files."
            )
        train, val, test = (windows_of(paths, self.context_length) for paths in splits.values())
        return train, self._spread(val), self._spread(test)

    def _spread(self, windows: torch.Tensor) -> torch.Tensor:
        count = min(self.num_eval_windows, len(windows))
        return windows[torch.arange(count) * len(windows) // count]


@dataclass(kw_only=True, eq=False, repr=False)
class ImageFolderDataModule(SplitDataModule):
    """Images in ``root/train/<class>/`` and ``root/val/<class>/``, the layout of ImageNet.

    Needs the extra ``[vision]``. ImageNet's test labels are not public, so ``val`` is the test set,
    too.

    Args:
        root: Folder with ``train`` and ``val``.
        batch_size: Number of images in a batch of one rank.
        image_size: Pixels per side after cropping.
        num_workers: Number of loader processes of each rank.
    """

    root: str
    batch_size: int = 32
    image_size: int = 224
    num_workers: int = 4

    def load(self) -> Sequence[Any]:
        """Return the three data sets of images, which read an image when it is asked for.

        Raises:
            FileNotFoundError: If ``root`` has no ``train`` or no ``val``.
        """
        val_set = self._open("val")
        return self._open("train"), val_set, val_set

    def _open(self, split: str) -> Any:
        if not (folder := Path(self.root) / split).is_dir():
            raise FileNotFoundError(
                f"{folder} does not exist. Set data.root=... to a folder with train/<class>/ and"
                " val/<class>/."
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


def windows_of(paths: list[Path], context_length: int) -> torch.Tensor:
    """Return all windows of the files' bytes, [windows, context_length + 1] uint8, as one view.

    Two neighbouring windows share one byte: it is the last target of one and the first input of the
    other.

    Raises:
        ValueError: If there are fewer bytes than one window has.
    """
    text = bytearray().join(path.read_bytes() for path in paths)
    if len(text) <= context_length:
        raise ValueError(
            f"The text has {len(text)} bytes, less than one window of {context_length + 1}."
            " Give more text (data.root=...) or a smaller data.context_length."
        )
    return torch.frombuffer(text, dtype=torch.uint8).unfold(0, context_length + 1, context_length)


def source_files(root: Path) -> list[Path]:
    """Return the ``.py`` files under ``root`` without tests, in an order equal on all machines."""
    paths = root.rglob("*.py")
    return sorted(one for one in paths if not EXCLUDED_FOLDERS & {*one.relative_to(root).parts})


def split_of(name: str) -> str:
    """Return ``train``, ``val`` or ``test`` for a file, from a hash of its relative name."""
    digest = hashlib.sha256(name.encode()).digest()
    return {0: "val", 1: "test"}.get(digest[0] % NUM_HASH_CLASSES, "train")
