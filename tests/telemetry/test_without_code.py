"""Records that need no code: a timeline by an environment variable, ranges in torch's profiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from lightning.pytorch.trainer.states import TrainerFn

from lightning_dear.callbacks import TimelineCallback
from lightning_dear.planning import ThresholdFusion
from lightning_dear.strategy.connections import append_callbacks

TRAINING = """
import json, sys
import lightning_dear
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.profiler import profile

options = dict(accelerator="cpu", devices=2, logger=False, enable_progress_bar=False, max_epochs=1)
options.update(limit_train_batches=14, limit_val_batches=0, enable_checkpointing=False)
trainer = Trainer(strategy="dear", **options)
with profile() as profiler:
    trainer.fit(BoringModel())
names = sorted({one.key for one in profiler.key_averages() if one.key.startswith("dear: ")})
if trainer.is_global_zero:
    print(json.dumps(names))
"""


def test_a_timeline_by_an_environment_variable_and_ranges_in_torchs_profiler(
    tmp_path: Path,
) -> None:
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "LIGHTNING_DEAR_TIMELINE": str(tmp_path / "seen")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "seen/timeline.json").read_text())["traceEvents"]
    names = json.loads(done.stdout.splitlines()[-1])
    assert {"dear: forward", "dear: backward"} <= {*names}
    assert any(name.startswith("dear: wait for all_gather") for name in names), names


def test_a_trainer_that_records_elsewhere_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_DEAR_TIMELINE", "seen")
    fitting: Any = SimpleNamespace(callbacks=[], state=SimpleNamespace(fn=TrainerFn.FITTING))
    for _ in range(2):
        # Once for a trainer, and silent where its own is found again.
        append_callbacks(fitting, ThresholdFusion(), None)
        assert [one.dirpath for one in fitting.callbacks] == ["seen"]
    fitting.callbacks = [TimelineCallback()]
    with pytest.warns(UserWarning, match="LIGHTNING_DEAR_TIMELINE is ignored"):
        append_callbacks(fitting, ThresholdFusion(), None)
    assert len(fitting.callbacks) == 1


def test_a_fit_does_not_write_what_a_failed_one_has_recorded(tmp_path: Path) -> None:
    callback, trainer = TimelineCallback(step=3, dirpath=str(tmp_path)), mock.MagicMock()
    for step in range(4):
        callback.on_train_batch_start(trainer, None, None, step)
    callback.on_fit_start(trainer)
    with pytest.warns(UserWarning, match="No timeline was written"):
        callback.on_train_end(trainer)
    assert not [*tmp_path.iterdir()]
