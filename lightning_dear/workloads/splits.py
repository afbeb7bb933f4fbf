"""A data module over three datasets; the strategy gives every process its share of each."""

from typing import Any

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset


class SplitDataModule(LightningDataModule):
    """Loaders over ``train_set``, ``val_set`` and ``test_set``, which subclasses set in setup.

    Lightning adds the distributed sampler. Where a split does not divide by the number of
    processes, that sampler repeats a few items, which moves a metric by less than one item per
    process.

    Args:
        batch_size: Items per batch and process.
        num_workers: Loader processes per training process; 0 loads in the training process.
    """

    def __init__(self, batch_size: int, num_workers: int = 0) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
        if num_workers < 0:
            raise ValueError(f"num_workers must be 0 or more, got {num_workers}.")
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.train_set: Dataset[Any] | None = None
        self.val_set: Dataset[Any] | None = None
        self.test_set: Dataset[Any] | None = None

    def collate(self, items: list[Any]) -> Any:
        """Make one batch of the items; torch's default unless a subclass overrides it."""
        from torch.utils.data import default_collate

        return default_collate(items)

    def train_dataloader(self) -> DataLoader[Any]:
        """Return shuffled batches; an incomplete last batch is dropped, as BatchNorm prefers."""
        return self._loader(self.train_set, is_training=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return the validation batches in order."""
        return self._loader(self.val_set, is_training=False)

    def test_dataloader(self) -> DataLoader[Any]:
        """Return the test batches in order."""
        return self._loader(self.test_set, is_training=False)

    def _loader(self, dataset: Dataset[Any] | None, is_training: bool) -> DataLoader[Any]:
        if dataset is None:
            raise RuntimeError("Call setup() before asking for a loader; a Trainer does so.")
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            shuffle=is_training,
            drop_last=is_training,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            collate_fn=self.collate,
        )
