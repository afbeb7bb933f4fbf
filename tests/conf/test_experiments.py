"""Every experiment runs its code path, end to end, on one CPU process."""

import pytest

from lightning_dear.apps import job
from lightning_dear.apps.train import train
from tests.conf.composing import composed, options_of

QUICK = ("trainer.fast_dev_run=true", "trainer.enable_progress_bar=false")


def run(folder, experiment, *overrides, strategy="single"):
    """Run one batch of everything in this process; return the test metrics."""
    choices = (f"experiment={experiment}", f"strategy={strategy}", "cluster=single_process")
    composition = composed(folder, *choices, *QUICK, *overrides)
    with composition as config, job.isolated_job():
        return train.train(config)


def needs(module, extra):
    pytest.importorskip(
        module, reason=f'{module} is missing: pip install "lightning-dear[{extra}]"'
    )


def test_every_experiment_is_tested():
    tested = {"digits", "lm", "replay", *IMAGENET}
    # tests/apps/test_converge.py and test_bench.py
    studies = {"converge_digits", "converge_gpt", "converge_gpt_long", "converge_gpt_sgd"}
    studies |= {"converge_local_steps", "bench_papers"}
    assert set(options_of("experiment")) == tested | studies


# DearStrategy refuses what it cannot do, also where it has nobody to communicate with.
BOTH = pytest.mark.parametrize("strategy", ["single", "dear"])


@BOTH
def test_digits(tmp_path, strategy):
    assert run(tmp_path, "digits", strategy=strategy).keys() == {"test_acc"}


@BOTH
def test_lm(tmp_path, strategy):
    assert 0 < run(tmp_path, "lm", strategy=strategy)["test_bits_per_byte"] < 9


def test_replay(tmp_path):
    assert run(tmp_path, "replay", "model.scale=1000", "model.compute_s=0.01") == {}


IMAGENET = {
    "imagenet_resnet50": "torchvision",
    "imagenet_densenet201": "torchvision",
    "imagenet_vgg16": "torchvision",
    "imagenet_inception_v4": "timm",
}


@pytest.mark.parametrize("experiment", IMAGENET)
def test_imagenet(experiment, tmp_path):
    needs("torchvision", "vision")
    needs(IMAGENET[experiment], "vision")
    from PIL import Image

    for split in ("train", "val"):
        for label in ("cat", "dog"):
            folder = tmp_path / "images" / split / label
            folder.mkdir(parents=True)
            for index in range(2):
                Image.new("RGB", (120, 120), (index, 100, 0)).save(folder / f"{index}.png")
    overrides = [f"data.root={tmp_path / 'images'}", "data.batch_size=2", "data.num_workers=0"]
    if experiment == "imagenet_inception_v4":
        overrides.append("data.image_size=96")
    else:
        overrides.append("data.image_size=64")
    assert run(tmp_path, experiment, *overrides).keys() == {"test_acc"}
