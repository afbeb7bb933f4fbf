import pytest
import torch

from lightning_dear.workloads import vision
from lightning_dear.workloads.extras import require


def needs(module):
    """Skip unless `module` is there; a broken installation is an error, not a skip."""
    pytest.importorskip(module, reason=f'{module} is missing: pip install "lightning-dear[vision]"')


@pytest.fixture
def image_folder(tmp_path):
    """Return a folder laid out as ImageNet: three classes, four images each."""
    needs("torchvision")
    from PIL import Image

    for split in ("train", "val"):
        for label in ("cat", "dog", "owl"):
            folder = tmp_path / split / label
            folder.mkdir(parents=True)
            for index in range(4):
                Image.new("RGB", (40, 50), (index * 20, 100, 0)).save(folder / f"{index}.png")
    return tmp_path


def test_an_unknown_network_lists_the_known_ones():
    with pytest.raises(ValueError, match="resnet50, densenet201, vgg16, inception_v4"):
        vision.vision_net("resnet51", 10)


@pytest.mark.parametrize("name", vision.NETS)
def test_networks_have_the_asked_for_classes(name):
    needs(vision.NETS[name])
    with torch.device("meta"):
        net = vision.vision_net(name, 7)
    assert net.eval()(torch.rand(1, 3, 96, 96, device="meta")).shape == (1, 7)


def test_image_folders_are_loaded_and_cropped(image_folder):
    module = vision.ImageFolderDataModule(
        root=str(image_folder), batch_size=3, image_size=32, num_workers=0
    )
    module.setup("fit")
    images, labels = next(iter(module.train_dataloader()))
    assert images.shape == (3, 3, 32, 32)
    assert len(module.test_set) == 12
    assert set(torch.cat([labels for _, labels in module.val_dataloader()]).tolist()) == {0, 1, 2}


def test_a_missing_image_folder_names_the_option(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data\.root=.*train/<class>/"):
        vision.ImageFolderDataModule(root=str(tmp_path)).setup("fit")


def test_missing_cifar_names_both_remedies(tmp_path):
    needs("torchvision")
    with pytest.raises(FileNotFoundError, match=r"data\.root=.*data\.download=true"):
        vision.Cifar10DataModule(root=str(tmp_path)).setup("fit")


def test_nothing_is_downloaded_unasked(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("tried to download")

    monkeypatch.setattr(vision, "require", refuse)
    vision.Cifar10DataModule(root=str(tmp_path)).prepare_data()
    with pytest.raises(AssertionError, match="tried to download"):
        vision.Cifar10DataModule(root=str(tmp_path), download=True).prepare_data()


def test_a_missing_library_names_the_extra(monkeypatch):
    def as_if_missing(module, extra):
        return require("no_such_" + module, extra)

    monkeypatch.setattr(vision, "require", as_if_missing)
    with pytest.raises(ModuleNotFoundError, match=r"lightning-dear\[vision\]"):
        vision.vision_net("inception_v4", 10)
