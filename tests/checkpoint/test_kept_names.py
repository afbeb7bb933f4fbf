"""What codecs keep is not taken for what others keep; and where it lies once it is loaded."""

from __future__ import annotations

import copy
import warnings

import torch
import torch.distributed as dist
from torch.nn import Parameter

from lightning_dear.checkpoint.residuals import FACTORS, STEERING, RowLayout, unpacked
from lightning_dear.collectives.world import World
from lightning_dear.compression import DGC, Codec, Signum
from tests.distributed.harness import distributed
from tests.exchange.test_coded import coded
from tests.training.linear import Run


def _state_of(codec: Codec) -> dict:
    run = Run(coded(codec))
    for _ in range(3):
        run.step()
    run.pipeline.complete_parameters()
    return copy.deepcopy(run.part.optimizer_state_dict())


def _said_dropped(codec: Codec, state: dict) -> tuple[list[str], dict]:
    """What is said where another run goes on from `state`, and what it begins with."""
    run = Run(coded(codec))
    run.step()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run.optimizer.load_state_dict(copy.deepcopy(state))
    messages = [str(one.message) for one in said if "is dropped" in str(one.message)]
    return messages, run.part.optimizer_state_dict()["residuals"]["worker"]


@distributed(world_sizes=(2,))
def test_a_running_mean_is_no_momentum() -> None:
    for one, other, names in (
        (Signum(), DGC(density=0.1), "running_mean"),
        (DGC(density=0.1, selector="exact"), Signum(), "momentum, residual, owner's residual"),
    ):
        said, begins_with = _said_dropped(other, _state_of(one))
        if dist.get_rank() == 0:
            (message,) = said
            assert f"({names}) is dropped" in message
        for kept in begins_with.values():
            assert not any(numbers.any() for numbers in kept.values())


def test_what_is_loaded_lies_where_its_parameter_does() -> None:
    """Collectives of a device take no tensor from another one."""
    numbers = torch.arange(12.0).view(2, 3, 2)
    state = {
        "worker": {"residual": {0: numbers}},
        "owner": {"residual": {0: numbers[0]}},
        "factors": {0: numbers[0]},
        "counts": {"reduce": 1, "gather": 1},
        "steering": {0: torch.arange(6.0, dtype=torch.float64).view(2, 3)},
    }
    for device in ("cpu", "meta"):
        parameter = Parameter(torch.zeros(3, 2, device=device))
        for world_size in (2, 3):
            held = unpacked(state, {0: parameter}, RowLayout(World(1, world_size)))
            found = [
                held.kept["worker", "residual"][parameter],
                held.kept["owner", "residual"][parameter],
                held.kept[FACTORS][parameter],
            ]
            # Regions are of as many ranks.
            steering = held.kept[STEERING].get(parameter, found[0])
            assert {one.device.type for one in (*found, steering)} == {device}
            assert [one.numel() for one in found] == [6, 6, 6]
