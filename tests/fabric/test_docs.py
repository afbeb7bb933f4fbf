"""The example in the documentation, run as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_example_trains(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "fabric.md").read_text()
    (source,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text(source)
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 2
    checkpoint = torch.load(tmp_path / "fabric.ckpt", weights_only=True)
    assert sorted(checkpoint) == ["epoch", "lightning_dear", "model", "optimizer"]
