import pytest
import torch

from lightning_dear.workloads.data import DigitsDataModule


def parts(**options):
    module = DigitsDataModule(**options)
    module.setup("fit")
    return {name: getattr(module, f"{name}_set").tensors for name in ("train", "val", "test")}


def test_splits_have_their_sizes_and_share_no_image():
    splits = parts()
    assert {name: len(images) for name, (images, _) in splits.items()} == {
        "train": 1197,
        "val": 240,
        "test": 360,
    }
    rows = [tuple(image.flatten().tolist()) for images, _ in splits.values() for image in images]
    assert len(set(rows)) == len(rows) == 1797


def test_images_are_scaled_and_classes_are_balanced():
    images, labels = parts()["test"]
    assert images.shape[1:] == (1, 8, 8)
    assert images.min() == 0.0
    assert images.max() == 1.0
    assert labels.bincount().min() >= 34


def test_the_split_seed_alone_decides_the_split():
    torch.manual_seed(1)
    first = parts(split_seed=3)["test"][0]
    torch.manual_seed(2)
    assert torch.equal(first, parts(split_seed=3)["test"][0])
    assert not torch.equal(first, parts(split_seed=4)["test"][0])


def test_too_small_a_split_is_refused():
    with pytest.raises(ValueError, match="number of classes"):
        DigitsDataModule(val_size=5).setup("fit")
