"""Whatever is late, on whichever rank: the results stay the same."""

from __future__ import annotations

from dataclasses import fields
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dear.collectives import gloo
from tests.distributed.harness import distributed
from tests.engine.test_parity import assert_equal, assert_equal_on_all_ranks
from tests.training.delays import Delays
from tests.training.models import batch, build, loss_of, optimizer_for
from tests.training.odd_models import ODD_MODELS
from tests.training.three_ways import new_pipeline, train_dear, train_reference, train_steps

LATE_S = 0.03
ALONE = {field.name: Delays(**{field.name: LATE_S}) for field in fields(Delays)}
TOGETHER = Delays(**{field.name: LATE_S / 3 for field in fields(Delays)})


@pytest.mark.parametrize("late", [*ALONE, "together"])
@pytest.mark.parametrize("model", ["conv", "gpt"])
@distributed(world_sizes=(2, 3))
def test_delays_change_nothing(model: str, late: str, world_size: int) -> None:
    ours = train_dear(model, "adamw", 4, delays=ALONE.get(late, TOGETHER))
    assert_equal_on_all_ranks(ours)
    assert_equal(ours, train_reference(model, "adamw", 4, world_size))


@pytest.mark.parametrize("delays", [None, TOGETHER], ids=["at_once", "late"])
@distributed(world_sizes=(3, 4))
def test_flags_and_buffers_that_ranks_pass_on_change_nothing(
    delays: Delays | None, world_size: int
) -> None:
    """As among more than 8 ranks."""
    rounds = mock.patch.object(gloo, "rounds_of", return_value=[[1], [2]])
    # Rank 2 gets rank 0's buffers from rank 1, and rank 3 from rank 2.
    parents = mock.patch.object(gloo, "parent_of", side_effect=lambda rank, _: max(rank - 1, 0))
    with rounds, parents:
        ours = train_dear("conv", "adamw", 4, delays=delays)
    assert_equal_on_all_ranks(ours)
    assert_equal(ours, train_reference("conv", "adamw", 4, world_size))


@distributed(world_sizes=(2, 3))
def test_module_buffers_follow_rank_0_however_late() -> None:
    model = build("conv")
    optimizer = optimizer_for("sgd", model)
    pipeline = new_pipeline(model, optimizer, delays=Delays(before_all_gather_s=LATE_S))
    for step in range(3):
        with pipeline.forward():
            loss = loss_of(model, *batch("conv", step, dist.get_rank()))
        own = [buffer.clone() for buffer in model.buffers()]
        optimizer.zero_grad()
        with pipeline.backward():
            loss.backward()
        optimizer.step()
        dist.barrier()
        for buffer, mine in zip(model.buffers(), own, strict=True):
            every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(every, mine)
            assert torch.equal(buffer, every[0])
            assert not buffer.is_floating_point() or not torch.equal(every[0], every[1])
    pipeline.detach()


class _HasBuffers(nn.Module):
    """Has buffers of all widths, in an order in which none would begin where it may."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        for number, dtype in enumerate(BUFFER_TYPES):
            self.register_buffer(f"b{number}", torch.full((3,), rank, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


BUFFER_TYPES = (torch.bool, torch.bfloat16, torch.float32, torch.complex128, torch.int64)


@distributed(world_sizes=(1, 2, 3))
def test_buffers_of_all_types_travel_in_one_message() -> None:
    model = _HasBuffers(dist.get_rank() + 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline = new_pipeline(model, optimizer)
    for _ in range(2):
        with pipeline.forward():
            loss = model(torch.ones(2)).sum()
        optimizer.zero_grad()
        with pipeline.backward():
            loss.backward()
        optimizer.step()
    pipeline.detach()
    for buffer, dtype in zip(model.buffers(), BUFFER_TYPES, strict=True):
        assert torch.equal(buffer, torch.full((3,), 1, dtype=dtype))


@distributed(world_sizes=(1, 2))
def test_buffers_that_the_user_writes_stay() -> None:
    """Also if they are written between a step and the next forward."""
    model = build("conv")
    pipeline = new_pipeline(model, optimizer_for("sgd", model))
    train_steps(pipeline, model, [0, 1, 2], "conv")  # Later forwards ask for no writes.
    pipeline.complete_parameters()
    for buffer in model.buffers():
        buffer.fill_(5)
    with pipeline.forward():
        assert all(bool((buffer == 5).all()) for buffer in model.buffers())
    pipeline.detach()
    assert all(bool((buffer == 5).all()) for buffer in model.buffers())


@pytest.mark.parametrize("model", sorted(ODD_MODELS))
@distributed(world_sizes=(1, 2, 3))
def test_late_gathers_are_waited_for_however_parameters_are_read(
    model: str, world_size: int
) -> None:
    delays = Delays(before_all_gather_s=LATE_S)
    ours = train_dear(model, "sgd", 4, delays=delays)
    theirs = train_reference(model, "sgd", 4, world_size)
    assert_equal_on_all_ranks(ours)
    for left, right in zip(ours[0], theirs[0], strict=True):
        for a, b in zip(left, right, strict=True):
            # A weight with several gradients in a backward adds them in autograd's order.
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
