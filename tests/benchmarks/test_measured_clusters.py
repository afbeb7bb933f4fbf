"""Which of the clusters that were measured predicts a cell."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.benchmarks.measured_cells import Cell
from tests.benchmarks.measured_clusters import File, nearest, read_files


def file(model: str, world_size: int, rate_mbit: float = 100.0) -> File:
    content = OmegaConf.create({"measured": {"world_size": world_size}, "name": model})
    return File(rate_mbit, model, content)


FILES = [file(model, ranks) for ranks in (2, 4) for model in ("resnet50", "bert_large")]


@pytest.mark.parametrize(
    ("model", "world_size", "name", "measured"),
    [
        ("bert_large", 2, "bert_large", 2),
        ("resnet50", 4, "resnet50", 4),
        ("bert_large", 8, "bert_large", 4),
        # 449 tensors: 398 are nearer than 161.
        ("inception_v4", 4, "bert_large", 4),
    ],
)
def test_the_most_ranks_count_before_the_model(
    model: str, world_size: int, name: str, measured: int
) -> None:
    content = nearest(FILES, Cell(model, world_size, 100.0, 16.0, "ddp"))
    assert (content.name, content.measured.world_size) == (name, measured)


def test_another_rate_says_nothing() -> None:
    with pytest.raises(ValueError, match="No cluster was measured at 1000 Mb/s"):
        nearest(FILES, Cell("resnet50", 4, 1000.0, 16.0, "ddp"))
    with pytest.raises(ValueError, match="No cluster was measured"):
        nearest([file("resnet50", 8)], Cell("resnet50", 4, 100.0, 16.0, "ddp"))


def test_a_file_is_read_with_its_rate_and_its_model(tmp_path: Path) -> None:
    path = tmp_path / "measured.yaml"
    path.write_text("measured: {world_size: 4}\n")
    (read,) = read_files([f"100:resnet50={path}"])
    assert (read.rate_mbit, read.model, read.world_size) == (100.0, "resnet50", 4)
    with pytest.raises(ValueError, match="is not RATE_MBIT:MODEL=FILE"):
        read_files([f"100={path}"])
