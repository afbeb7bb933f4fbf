"""gather="gradients" with a Trainer: checkpoints of either kind go on in either mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.harness import run_ranks
from tests.lightning.fitting import assert_same, dear
from tests.lightning.test_sharded_saving import NAME, _resume, _train


def _modes(**options: Any) -> list[Any]:
    return [dear(**options), dear(gather="gradients", **options)]


def _go_on_from_either(folder: Path) -> None:
    seen = _train(dear(gather="gradients"), folder / "file", "mlp", "adamw")
    options = {"save_distributed_checkpoint": True}
    folders = _train(dear(gather="gradients", **options), folder / "folder", "mlp", "adamw")
    assert_same(folders, seen, "weights")
    assert_same(_train(dear(), folder / "parameters", "mlp", "adamw"), seen, "weights")
    for kind in ("file", "folder", "parameters"):
        for mode in _modes():
            resumed = _resume(mode, folder / kind / NAME, "mlp", "adamw")
            assert_same(resumed, seen, f"weights from a {kind}")


@pytest.mark.slow
def test_checkpoints_go_on_in_either_mode(tmp_path: Path) -> None:
    run_ranks(_go_on_from_either, 2, tmp_path)
