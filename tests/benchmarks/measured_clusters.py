"""What `dear-plan calibrate` wrote of clusters, and which of it is nearest to a cell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from omegaconf import DictConfig, OmegaConf

from lightning_dear.simulator import Workload
from lightning_dear.workloads.replay import load_profile
from lightning_dear.workloads.replay.profile import planned
from tests.benchmarks.measured_cells import Cell


@dataclass(frozen=True)
class File:
    """A cluster's file: of a rate, and measured with a model."""

    rate_mbit: float
    model: str
    content: DictConfig

    @property
    def world_size(self) -> int:
        """How many ranks were measured."""
        return int(self.content.measured.world_size)


def read_files(words: Iterable[str]) -> list[File]:
    """Read RATE_MBIT:MODEL=FILE.

    Raises:
        ValueError: If one is something else.
    """
    files = []
    for word in words:
        measured_with, _, path = word.partition("=")
        rate_mbit, _, model = measured_with.partition(":")
        if not (model and path):
            raise ValueError(f"{word!r} is not RATE_MBIT:MODEL=FILE.")
        content = OmegaConf.load(path)
        assert isinstance(content, DictConfig)
        files.append(File(float(rate_mbit), model, content))
    return files


def nearest(files: Sequence[File], cell: Cell) -> DictConfig:
    """That with the most ranks up to the cell's, and the nearest number of tensors.

    Raises:
        ValueError: If there is none.
    """
    fitting = [
        file
        for file in files
        if file.rate_mbit == cell.rate_mbit and file.world_size <= cell.world_size
    ]
    if not fitting:
        raise ValueError(f"No cluster was measured at {cell.rate_mbit:g} Mb/s for {cell}.")
    count = len(workload_of(cell.model).tensors)

    def unlike(file: File) -> tuple[int, int]:
        return -file.world_size, abs(len(workload_of(file.model).tensors) - count)

    return min(fitting, key=unlike).content


@cache
def workload_of(model: str) -> Workload:
    """The whole model, as long as its profile says."""
    return Workload(model, *planned(load_profile(model)))
