"""Networks and image data that benchmarks of distributed training use; needs ``[vision]``."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset

from lightning_dear.workloads.data import SplitDataModule
from lightning_dear.workloads.extras import require

NETS = {
    "resnet50": "torchvision",
    "densenet201": "torchvision",
    "vgg16": "torchvision",
    "inception_v4": "timm",
    "resnet101": "torchvision",
}
"""Networks by name, and the library each comes from."""

# Means and deviations of the colour channels, from each data set's training images.
_CIFAR10_STATISTICS = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
_IMAGENET_STATISTICS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def vision_net(name: str, num_classes: int) -> Any:
    """Build a network with random weights; downloads nothing.

    Args:
        name: One of ``NETS``. Inception-v4 needs images of 75 pixels or more.
        num_classes: Number of logits.

    Raises:
        ValueError: If the name is unknown; the message lists the valid ones.
        ModuleNotFoundError: If the library is not installed.
    """
    if name not in NETS:
        raise ValueError(f"Unknown network {name!r}; valid names: {', '.join(NETS)}.")
    if NETS[name] == "timm":
        return require("timm", "vision").create_model(name, num_classes=num_classes)
    models = require("torchvision.models", "vision")
    return models.get_model(name, weights=None, num_classes=num_classes)


@dataclass(kw_only=True, eq=False, repr=False)
class Cifar10DataModule(SplitDataModule):
    """CIFAR-10 through torchvision; part of the training images is held out for validation.

    Args:
        root: Folder that holds, or will hold, ``cifar-10-batches-py``.
        batch_size: Images per batch and process.
        image_size: Pixels per side that images are resized to; 32 leaves them as they are.
        val_size: Training images held out for validation.
        split_seed: Seed of that split.
        download: Fetch the data (170 MB) into ``root`` where it is missing.
        num_workers: Loader processes per training process.
    """

    root: str
    batch_size: int = 64
    image_size: int = 32
    val_size: int = 5000
    split_seed: int = 0
    download: bool = False
    num_workers: int = 2

    def prepare_data(self) -> None:
        """Download the data on one process per host, if that was asked for."""
        if self.download:
            require("torchvision.datasets", "vision").CIFAR10(self.root, download=True)

    def load(self) -> Sequence[Any]:
        """Open the data.

        Raises:
            FileNotFoundError: If it is not in ``root``.
        """
        generator = torch.Generator().manual_seed(self.split_seed)
        order = torch.randperm(50_000, generator=generator).tolist()
        # Two views of the same images, since only training images are changed at random.
        augmented = self._open(is_training=True, is_augmented=True)
        plain = self._open(is_training=True, is_augmented=False)
        return (
            Subset(augmented, order[self.val_size :]),
            Subset(plain, order[: self.val_size]),
            self._open(is_training=False, is_augmented=False),
        )

    def _open(self, is_training: bool, is_augmented: bool) -> Any:
        datasets = require("torchvision.datasets", "vision")
        try:
            return datasets.CIFAR10(
                self.root, train=is_training, transform=self._transform(is_augmented)
            )
        except RuntimeError as error:
            raise FileNotFoundError(
                f"CIFAR-10 is not in {self.root}: set data.root=... to its folder, or "
                "data.download=true."
            ) from error

    def _transform(self, is_augmented: bool) -> Any:
        transforms = require("torchvision.transforms", "vision")
        steps: list[Any] = []
        if is_augmented:
            steps += [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
        if self.image_size != 32:
            steps.append(transforms.Resize(self.image_size))
        steps += [transforms.ToTensor(), transforms.Normalize(*_CIFAR10_STATISTICS)]
        return transforms.Compose(steps)


@dataclass(kw_only=True, eq=False, repr=False)
class ImageFolderDataModule(SplitDataModule):
    """Images in ``root/train/<class>/`` and ``root/val/<class>/``, as ImageNet is laid out.

    ImageNet's test labels are not public, so ``val`` serves for the test as well.

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
        transform = self._transform(is_augmented=split == "train")
        return require("torchvision.datasets", "vision").ImageFolder(str(folder), transform)

    def _transform(self, is_augmented: bool) -> Any:
        transforms = require("torchvision.transforms", "vision")
        size = self.image_size
        if is_augmented:
            crop = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
        else:
            # The usual margin: 256 pixels for a crop of 224.
            crop = [transforms.Resize(size * 8 // 7), transforms.CenterCrop(size)]
        tail = [transforms.ToTensor(), transforms.Normalize(*_IMAGENET_STATISTICS)]
        return transforms.Compose([*crop, *tail])
