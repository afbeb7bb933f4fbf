"""gather="gradients", its limit on gathers in flight, and all-reduced buckets: DDP's weights."""

from __future__ import annotations

import pytest

from lightning_dear.gathering import Gathering
from tests.distributed.harness import distributed
from tests.engine.test_parity import assert_equal, assert_equal_on_all_ranks
from tests.engine.training import train_ddp, train_dear

GRADIENTS = Gathering("gradients")
ALL_REDUCED = Gathering("gradients", decouple=False)
ONE_BY_ONE = Gathering("gradients", 1)
NUM_STEPS = 8


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("model", ["conv", "gpt", "mlp"])
@distributed(world_sizes=(1, 2))
def test_weights_have_the_bits_of_ddp(model: str, optimizer: str) -> None:
    theirs = train_ddp(model, optimizer, NUM_STEPS)
    for gathering in (GRADIENTS, ALL_REDUCED, ONE_BY_ONE, Gathering("parameters", 1)):
        ours = train_dear(model, optimizer, NUM_STEPS, gathering=gathering)
        assert_equal(ours, theirs)
        assert ours[1] == theirs[1]
        assert_equal_on_all_ranks(ours)
