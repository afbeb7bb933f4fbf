"""A block times steady steps of a fresh fit and nothing else."""

from __future__ import annotations

import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_dear.studies.block import BlockLength, Rig, StepProbe, run_block

RIG = Rig(rank=0, world_size=1, interface="lo")


class Slow(LightningModule):
    """Takes 4 ms a batch, 40 for the first three."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.num_batches = 0

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        time.sleep(0.04 if self.num_batches < 3 else 0.004)
        self.num_batches += 1
        return (self.weight * batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def new_trainer(**options: object) -> Trainer:
    return Trainer(
        accelerator="cpu",
        strategy=SingleDeviceStrategy(device="cpu"),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=-1,
        **options,
    )


def test_the_warm_up_is_left_out_and_one_step_more_marks_the_end() -> None:
    module = Slow()
    length = BlockLength(num_warm_up_steps=3, num_steps=5)
    done: list[int] = []

    def count() -> None:
        done.append(module.num_batches)

    measured = run_block(RIG, new_trainer, module, [torch.ones(3)], length, count)
    assert module.num_batches == 9
    assert done == list(range(1, 9))
    assert len(measured.steps) == 5
    # The median: other processes may hold one step up.
    step_s, forward_s, backward_s, *waits = np.median(measured.steps, axis=0)
    assert 0.004 <= forward_s <= step_s < 0.03
    assert 0 < backward_s < step_s
    assert np.isnan(waits).all()
    assert measured.load["num_buckets"] is None
    assert 0 < measured.load["cpu_per_rank"] * measured.steps[:, 0].sum() < 5
    assert measured.rank == 0


def test_accumulated_batches_are_one_step() -> None:
    module = Slow()
    trainer = partial(new_trainer, accumulate_grad_batches=2)
    done: list[int] = []
    count = partial(done.append, 1)
    measured = run_block(RIG, trainer, module, [torch.ones(3)], BlockLength(3, 4), count)
    assert module.num_batches == 16
    assert len(done) == 7
    assert len(measured.steps) == 4
    assert measured.steps[:, 1].min() >= 0.008


def test_figures_belong_to_the_step_they_are_of() -> None:
    stamps = StepProbe(BlockLength(3, 2))
    stamps.begins_s = [0.0, 1.0, 2.0, 3.0, 5.0, 8.0]
    stamps.forward_s = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    stamps.backward_s = [0.5] * 6
    stamps.statistics = [
        SimpleNamespace(exposed_reduce_scatter_s=0.01, exposed_all_gather_s=0.0, wire_bytes=7),
        None,
    ]
    first, second = stamps.steps()
    assert first.tolist() == [2.0, 0.4, 0.5, 0.01, 0.0, 7.0]
    assert second[:3].tolist() == [3.0, 0.5, 0.5]
    assert np.isnan(second[3:]).all()


def test_batches_are_given_again_and_again() -> None:
    seen: list[float] = []

    class Watched(Slow):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            seen.append(float(batch[0]))
            return super().training_step(batch, batch_idx)

    batches = [torch.ones(3), 2 * torch.ones(3)]
    run_block(RIG, new_trainer, Watched(), batches, BlockLength(3, 1))
    assert seen == [1, 2, 1, 2, 1]
    with pytest.raises(ValueError, match="no batch"):
        run_block(RIG, new_trainer, Slow(), [], BlockLength(3, 1))


def test_a_block_of_local_steps_has_whole_rounds() -> None:
    assert BlockLength(3, 4).of_rounds(1) == BlockLength(3, 4)
    assert BlockLength(3, 4).of_rounds(32) == BlockLength(32, 32, 32)
    assert BlockLength(9, 16).of_rounds(8) == BlockLength(16, 16, 8)
    length = BlockLength(3, 4).of_rounds(8)
    measured = run_block(RIG, new_trainer, Slow(), [torch.ones(3)], length)
    assert (len(measured.steps), measured.period) == (8, 8)


@pytest.mark.parametrize("lengths", [(2, 5), (3, 0)])
def test_a_block_without_steady_steps_is_refused(lengths: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="steps=.*(Set 3|Choose 1) or more"):
        BlockLength(*lengths)
