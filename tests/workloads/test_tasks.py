"""The LightningModules: what they log, what they save, what they build."""

import math
from functools import partial

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_dear.workloads.nets import GPT, ResNet
from lightning_dear.workloads.schedules import warmup_cosine
from lightning_dear.workloads.task import Classifier, LanguageModel

SGD = partial(torch.optim.SGD, lr=0.1)


def classifier(**options):
    return Classifier(ResNet(channels=(4,), num_blocks=1), SGD, **options)


def images(count=8):
    return DataLoader(
        TensorDataset(torch.rand(count, 1, 8, 8), torch.arange(count) % 10), batch_size=4
    )


def trainer_in(folder, **options):
    defaults = {"max_epochs": 1, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(default_root_dir=folder, accelerator="cpu", logger=False, **defaults | options)


def test_the_classifier_logs_its_metrics(tmp_path):
    trainer = trainer_in(tmp_path)
    task = classifier()
    trainer.fit(task, images(), images())
    assert {"train_loss", "val_loss", "val_acc"} <= trainer.callback_metrics.keys()
    (metrics,) = trainer.test(task, images(), verbose=False)
    assert metrics.keys() == {"test_acc"}


def test_accuracy_counts_correct_answers(tmp_path):
    class Oracle(torch.nn.Module):
        def forward(self, inputs):
            return torch.nn.functional.one_hot(inputs[:, 0, 0, 0].long(), 10).float()

    labels = torch.arange(8)
    answers = labels.clone()
    answers[:2] = 9
    inputs = answers.float().view(8, 1, 1, 1)
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=3)
    (metrics,) = trainer_in(tmp_path).test(Classifier(Oracle(), SGD), loader, verbose=False)
    assert metrics["test_acc"] == pytest.approx(6 / 8)


def test_bits_per_byte_weigh_windows_alike(tmp_path):
    class Uniform(torch.nn.Module):
        def forward(self, text):
            # Certain of byte 0: right for the zeros, off by a known amount for the rest.
            return torch.tensor([8 * math.log(2)] + [0.0] * 255).expand(*text.shape, 256)

    windows = torch.zeros(5, 9, dtype=torch.uint8)
    windows[4] = 1
    loader = DataLoader(windows, batch_size=4)
    (metrics,) = trainer_in(tmp_path).test(LanguageModel(Uniform(), SGD), loader, verbose=False)
    right = math.log2(256 + 255) - 8
    assert metrics["test_bits_per_byte"] == pytest.approx((4 * right + (right + 8)) / 5, rel=1e-4)


@pytest.mark.parametrize("scheduler", [None, warmup_cosine])
def test_a_checkpoint_loads_as_plain_weights(tmp_path, scheduler):
    trainer = trainer_in(tmp_path, max_steps=2)
    trainer.fit(classifier(scheduler=scheduler, label_smoothing=0.1), images(), images())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert checkpoint["hyper_parameters"] == {"label_smoothing": 0.1}


def test_the_schedule_is_stepped_to_its_end(tmp_path):
    rates = []

    class Noting(Classifier):
        def on_train_batch_end(self, *args):
            rates.append(self.optimizers().param_groups[0]["lr"])

    task = Noting(ResNet(channels=(4,), num_blocks=1), SGD, scheduler=warmup_cosine)
    trainer_in(tmp_path, max_epochs=2).fit(task, images(), images())
    assert len(rates) == 4
    assert rates[-1] == pytest.approx(0.05 * 0.1)


def test_frozen_parameters_stay_out_of_the_optimizer():
    task = classifier()
    task.net.stem.weight.requires_grad_(False)
    optimizer = task.configure_optimizers()
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert id(task.net.stem.weight) not in known
    assert len(known) == len(list(task.parameters())) - 1


def test_a_schedule_needs_an_end(tmp_path):
    task = classifier(scheduler=warmup_cosine)
    with pytest.raises(ValueError, match=r"trainer\.max_steps"):
        trainer_in(tmp_path, max_epochs=-1).fit(task, images(), images())


def test_without_a_mesh_the_model_stays_as_it_is():
    task = LanguageModel(GPT(context_length=4, width=8, num_layers=1, num_heads=1), SGD)
    task.configure_model()
    assert type(task.net) is GPT
