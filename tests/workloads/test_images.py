import sys

import pytest
import torch

from lightning_dear.workloads import data


@pytest.fixture
def image_folder(tmp_path):
    """Return a folder laid out as ImageNet: three classes, four images each."""
    pytest.importorskip("torchvision", reason='pip install "lightning-dear[vision]"')
    from PIL import Image

    for split in ("train", "val"):
        for label in ("cat", "dog", "owl"):
            folder = tmp_path / split / label
            folder.mkdir(parents=True)
            for index in range(4):
                Image.new("RGB", (40, 50), (index * 20, 100, 0)).save(folder / f"{index}.png")
    return tmp_path


def test_image_folders_are_loaded_and_cropped(image_folder):
    module = data.ImageFolderDataModule(
        root=str(image_folder), batch_size=3, image_size=32, num_workers=0
    )
    module.setup("fit")
    images, labels = next(iter(module.train_dataloader()))
    assert images.shape == (3, 3, 32, 32)
    assert len(module.test_set) == 12
    assert set(torch.cat([labels for _, labels in module.val_dataloader()]).tolist()) == {0, 1, 2}


def test_a_missing_image_folder_names_the_option(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data\.root=.*train/<class>/"):
        data.ImageFolderDataModule(root=str(tmp_path)).setup("fit")


def test_a_missing_library_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "val").mkdir()
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ModuleNotFoundError, match=r"lightning-dear\[vision\]"):
        data.ImageFolderDataModule(root=str(tmp_path)).setup("fit")
