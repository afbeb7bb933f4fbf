"""A captured graph runs no hook. Forward waits for all parameters before, on simulated NCCL."""

from __future__ import annotations

import pytest
import torch

from tests.streams.ranks import Rank, on_simulated_cuda
from tests.streams.trainings import OnDevice, Training, reference, train
from tests.training.captured import capture
from tests.training.models import build


def _capture(trained: OnDevice, step: int) -> None:
    if step == 1:
        trained.pipeline.complete_parameters("capture")
        capture(trained.model.layers, build("mlp").layers)


def _train(rank: Rank) -> list[torch.Tensor]:
    return train(Training(), rank, hook=_capture)


@pytest.mark.filterwarnings("ignore:A compiled module, a CUDA graph")
@pytest.mark.parametrize("size", [2, 3])
def test_what_a_captured_graph_reads_is_waited_for(size: int) -> None:
    found = on_simulated_cuda(_train, size)
    found.check()
    for weights in found.results:
        assert all(map(torch.equal, weights, reference(Training(), size)))
