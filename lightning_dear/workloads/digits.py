"""Handwritten digits, 8x8 pixels, as they come with scikit-learn: real data, no download."""

import torch
from torch.utils.data import TensorDataset

from lightning_dear.workloads.splits import SplitDataModule

NUM_PIXELS = 8
MAX_GREY = 16.0


class DigitsDataModule(SplitDataModule):
    """1,797 digits as images of shape (1, 8, 8) in [0, 1], split by class with a seed.

    Args:
        batch_size: Images per batch and process.
        val_size: Images held out for validation.
        test_size: Images held out for the test.
        split_seed: Seed of the split; apart from the run's seed, so that runs stay comparable.
        num_workers: Loader processes; the data lies in memory, so 0 is fastest.
    """

    def __init__(
        self,
        batch_size: int = 32,
        val_size: int = 240,
        test_size: int = 360,
        split_seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, num_workers)
        if val_size < 10 or test_size < 10:
            raise ValueError(
                f"val_size and test_size must hold 10 images or more, one per class; "
                f"got {val_size} and {test_size}."
            )
        self.val_size = val_size
        self.test_size = test_size
        self.split_seed = split_seed

    def setup(self, stage: str) -> None:
        """Load the images into memory and split them; called on every process."""
        if self.train_set is not None:
            return
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        images, labels = load_digits(return_X_y=True)
        rest, test, rest_labels, test_labels = train_test_split(
            images, labels, test_size=self.test_size, stratify=labels, random_state=self.split_seed
        )
        train, val, train_labels, val_labels = train_test_split(
            rest,
            rest_labels,
            test_size=self.val_size,
            stratify=rest_labels,
            random_state=self.split_seed,
        )
        self.train_set = _tensors(train, train_labels)
        self.val_set = _tensors(val, val_labels)
        self.test_set = _tensors(test, test_labels)


def _tensors(images: object, labels: object) -> TensorDataset:
    pixels = torch.as_tensor(images, dtype=torch.float32).div(MAX_GREY)
    return TensorDataset(
        pixels.reshape(-1, 1, NUM_PIXELS, NUM_PIXELS), torch.as_tensor(labels, dtype=torch.int64)
    )
