"""What codecs draw at random: by rank 0's seed, from the first step to the last, resumed or not."""

from __future__ import annotations

import copy
import hashlib
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_dear.checkpoint.residuals import RowLayout, unpacked
from lightning_dear.collectives.world import World
from lightning_dear.compression import CODECS, Compressor, PowerSGD, RandomK
from lightning_dear.exchange.coded_bucket import CodedBucket
from lightning_dear.planning import NoFusion
from tests.distributed.harness import distributed
from tests.exchange.test_coded import coded
from tests.exchange.test_frozen import _grow
from tests.training.linear import Run
from tests.training.models import weights

DRAWING: tuple[Compressor, ...] = (
    *(CODECS[name]() for name in ("qsgd", "terngrad", "natural")),
    RandomK(density=0.1),
    PowerSGD(rank=1, min_saving=1.0),
)


def _run(codec: Compressor, seed: int, num_steps: int = 3) -> Run:
    """Weights begin as zeros, and gradients are the same whatever the seed."""
    torch.manual_seed(seed)
    run = Run(coded(codec))
    for _ in range(num_steps):
        run.step()
    return run


def _weights(run: Run) -> Tensor:
    run.pipeline.complete_parameters()
    return torch.cat([one.flatten() for one in weights(run.model)])


def _state(run: Run) -> dict[str, Any]:
    return copy.deepcopy(run.part.optimizer_state_dict())


def _resumed(run: Run, state: dict[str, Any], seed: int) -> Run:
    torch.manual_seed(seed)
    other = Run(run.pipeline.options)
    other.resume(run)
    other.optimizer.load_state_dict(copy.deepcopy(state))
    return other


@pytest.mark.parametrize("codec", DRAWING, ids=lambda codec: codec.name)
@distributed(world_sizes=(2,))
def test_another_seed_draws_other_numbers(codec: Compressor) -> None:
    first, again, other = (_weights(_run(codec, seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("codec", DRAWING, ids=lambda codec: codec.name)
@distributed(world_sizes=(2,))
def test_rank_0s_seed_counts(codec: Compressor) -> None:
    ours = _weights(_run(codec, 7 + dist.get_rank()))
    assert torch.equal(ours, _weights(_run(codec, 7)))
    first = ours.clone()
    dist.broadcast(first, 0)
    assert torch.equal(ours, first)


@pytest.mark.parametrize("codec", DRAWING, ids=lambda codec: codec.name)
@distributed(world_sizes=(2,))
def test_a_resumed_run_keeps_the_seed(codec: Compressor) -> None:
    """The largest there is, through a file, and once more before a step."""
    run = _run(codec, -1)
    file = io.BytesIO()
    torch.save(_state(run), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert saved["residuals"]["seed"] == 2**64 - 1
    assert run.part.sharded_state_dict()["residuals"]["seed"] == 2**64 - 1
    resumed = _resumed(run, saved, seed=2)
    assert _state(resumed)["residuals"]["seed"] == 2**64 - 1
    assert resumed.part.sharded_state_dict()["residuals"]["seed"] == 2**64 - 1
    for _ in range(2):
        run.step()
        resumed.step()
    assert torch.equal(_weights(run), _weights(resumed))


def _without_residuals(state: dict[str, Any]) -> dict[str, Any]:
    assert "residuals" in state
    return {key: value for key, value in state.items() if key != "residuals"}


def _record_anew(run: Run) -> None:
    """Back to before the first step, and there a state that nothing was left of is loaded."""
    _grow(run)
    run.pipeline.complete_parameters()
    with run.pipeline.forward():
        pass
    assert run.part.plan is None
    run.optimizer.load_state_dict(_without_residuals(_state(run)))
    run.step()


@pytest.mark.parametrize("codec", DRAWING, ids=lambda codec: codec.name)
@distributed(world_sizes=(2,))
def test_the_seed_stays_whatever_is_drawn_from_meanwhile(codec: Compressor) -> None:
    """Another plan, and states without residuals, with a plan and without."""
    runs = [_run(codec, 1) for _ in range(2)]
    plain = _without_residuals(_state(runs[0]))
    for seed, run in zip((1, 2), runs, strict=True):
        torch.manual_seed(seed)
        run.part.replan(NoFusion().plan(run.part.tensors, dist.get_world_size()))
        run.step()
        run.optimizer.load_state_dict(copy.deepcopy(plain))
        run.step()
        _record_anew(run)
        assert _state(run)["residuals"]["seed"] == 1
    assert torch.equal(_weights(runs[0]), _weights(runs[1]))


@distributed(world_sizes=(2,))
def test_a_loaded_seed_stays_in_use() -> None:
    run = _run(RandomK(density=0.1), 1)
    resumed = _resumed(run, _state(run), seed=2)
    resumed.step()
    _record_anew(resumed)
    assert _state(resumed)["residuals"]["seed"] == 1


@pytest.mark.parametrize("codec", DRAWING, ids=lambda codec: codec.name)
@distributed(world_sizes=(2,))
def test_a_state_of_earlier_versions_goes_on_without_a_seed(codec: Compressor) -> None:
    run = _run(codec, 1)
    state = _state(run)
    del state["residuals"]["seed"]
    # Those had drawn another one for what they do not know.
    state["residuals"]["factors"].clear()
    one, other = (_resumed(run, state, seed) for seed in (1, 2))
    again = _resumed(one, _state(one), seed=3)
    for resumed in (one, other, again):
        resumed.step()
    assert torch.equal(_weights(one), _weights(other))
    assert torch.equal(_weights(one), _weights(again))
    if not isinstance(codec, PowerSGD):
        first = one.part.plans.active.exchange.coded[0]  # type: ignore[union-attr]
        assert isinstance(first, CodedBucket)
        is_private = first.compressor.randomness == "private"
        key, turn = (f"reduce 0 5 {dist.get_rank()}", 0) if is_private else ("turns 0", 4)
        digest = hashlib.blake2b(key.encode(), digest_size=7).digest()
        encoded = first._encode(
            "reduce", torch.zeros(2, first.spec.padded_numel // 2), first.outgoing
        )
        assert encoded.seed == int.from_bytes(digest, "big") + turn
    run.step()
    assert not torch.equal(_weights(one), _weights(run))


def test_other_numbers_of_ranks_get_the_seed_too() -> None:
    counts = {"reduce": 1, "gather": 1}
    state = {"worker": {"residual": {0: torch.ones(2, 3)}}, "owner": {}, "counts": counts}
    for world_size in (1, 2, 3):
        held = unpacked(
            {**state, "seed": 5}, {0: Parameter(torch.zeros(3))}, RowLayout(World(0, world_size))
        )
        assert held.seed == 5
