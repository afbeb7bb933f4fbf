"""Where both halves draw, they draw the same: all that the first brings is sent by the second."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dear.collectives.streams import Streams
from lightning_dear.compression import RandomK
from lightning_dear.compression.codec import Randomness
from lightning_dear.planning import SingleFusion
from tests.distributed.harness import distributed
from tests.engine.test_parity import assert_equal_on_all_ranks
from tests.exchange.test_coded import coded
from tests.training.linear import Run
from tests.training.models import weights

DENSITY = 0.05
NUM_STEPS = 20
"""Of a round in which each number has its turn."""


def _updates(run: Run, num_steps: int) -> Tensor:
    """What arrived in each step, [num_steps, all weights]."""
    seen = [_flat(run)]
    for _ in range(num_steps):
        run.step()
        seen.append(_flat(run))
    return torch.stack(seen).diff(dim=0)


def _flat(run: Run) -> Tensor:
    run.pipeline.complete_parameters()
    return torch.cat([one.flatten() for one in weights(run.model)])


def _owners_hold_back(run: Run) -> bool:
    """Whether they keep something of what has arrived."""
    kept = run.part.plans.residuals.taken().kept["owner", "residual"].values()
    return any(bool(one.any()) for one in kept)


@distributed(world_sizes=(1, 2, 3))
def test_what_arrives_is_a_share_of_density_and_not_of_its_square() -> None:
    run = Run(coded(RandomK(density=DENSITY)), SingleFusion())
    shares = (_updates(run, NUM_STEPS) != 0).double().mean(1)
    # Rows have places between parameters, too.
    assert float(shares.min()) >= 0.8 * DENSITY
    assert not _owners_hold_back(run)


@distributed(world_sizes=(2,))
def test_one_encoded_half_and_two_bring_the_same() -> None:
    """A second half that is encoded changes no bit."""
    both, one = (
        Run(coded(RandomK(density=DENSITY), halves=halves)) for halves in ("both", "reduce")
    )
    assert torch.equal(_updates(both, 6), _updates(one, 6))


@distributed(world_sizes=(2,))
def test_each_weight_has_its_turn_in_two_rounds() -> None:
    run = Run(coded(RandomK(density=DENSITY)), SingleFusion())
    arrived = _updates(run, 2 * NUM_STEPS) != 0
    assert bool(arrived.any(0).all())


@distributed(world_sizes=(2,))
def test_steps_that_are_not_made_take_no_turn() -> None:
    """Nor does a second round of the same step."""
    plain, other = (Run(coded(RandomK(density=DENSITY)), SingleFusion()) for _ in range(2))
    for step in range(6):
        if step % 2:
            other.backward(step=100 + step)
            other.optimizer.zero_grad()
        else:
            other.backward(step=200 + step)
        other.step()
        plain.step()
    assert torch.equal(_updates(plain, 1) != 0, _updates(other, 1) != 0)
    assert not _owners_hold_back(other)


@dataclass(frozen=True, kw_only=True)
class _DrawsAnew(RandomK):
    """Draws for each half for itself, as codecs may that all ranks draw alike for."""

    randomness: ClassVar[Randomness] = "shared"


@distributed(world_sizes=(2,))
def test_who_asks_for_other_draws_in_both_halves_gets_them() -> None:
    run = Run(coded(_DrawsAnew(density=0.3, decay=1.0)), SingleFusion())
    for _ in range(4):
        run.step()
    assert run.error() <= 1e-5
    assert_equal_on_all_ranks(([weights(run.model)], []))
    assert _owners_hold_back(run)


@distributed(world_sizes=(2,))
def test_devices_that_draw_other_numbers_are_refused_on_all_ranks() -> None:
    model = property(lambda streams: f"card {dist.get_rank()}")
    with mock.patch.object(Streams, "model", model):
        Run(coded(RandomK(density=0.3)), SingleFusion())
        with pytest.raises(ValueError, match=r"on card 0 on rank 0 and .* on card 1 .*'randomk'"):
            Run(coded(_DrawsAnew(density=0.3, decay=1.0)), SingleFusion())
