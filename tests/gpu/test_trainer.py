"""One Trainer run as people have it: 16-bit mixed precision, validation, a checkpoint, a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

import lightning_dear  # noqa: F401
from tests.distributed.harness import run_ranks
from tests.lightning.nets import BATCH_SIZE, Net, data

pytestmark = pytest.mark.gpu


def fit(path: Path, num_epochs: int, *, resumes: bool) -> dict[str, torch.Tensor]:
    """Weights after so many epochs, each with a validation that saves."""
    torch.manual_seed(0)
    module = Net()
    keeper = ModelCheckpoint(path, save_last=True, every_n_epochs=1)
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        strategy="dear",
        precision="16-mixed",
        max_epochs=num_epochs,
        callbacks=[keeper],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # In one order, whatever was drawn before.
    samples = DataLoader(data().dataset, batch_size=BATCH_SIZE)
    trainer.fit(module, samples, samples, ckpt_path=str(path / "last.ckpt") if resumes else None)
    assert trainer.state.finished
    return {name: one.detach().cpu() for name, one in module.state_dict().items()}


def test_a_resumed_fit_in_mixed_precision_is_the_fit_in_one(tmp_path: Path) -> None:
    # A process group of gloo would keep Lightning from validating in inference mode.
    how: Any = {"init_process_group": False, "timeout_s": 150}
    (whole,) = run_ranks(fit, 1, tmp_path / "whole", 4, resumes=False, **how)
    run_ranks(fit, 1, tmp_path / "parts", 2, resumes=False, **how)
    (resumed,) = run_ranks(fit, 1, tmp_path / "parts", 4, resumes=True, **how)
    for name, one in whole.items():
        assert one.isfinite().all()
        assert torch.equal(resumed[name], one), name
