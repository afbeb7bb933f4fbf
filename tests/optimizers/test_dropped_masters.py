"""Masters of a checkpoint where nobody steps masters: people are told, and weights go on."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dear.compression import Int4
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.optimizers.masters import MASTER_KEY
from tests.distributed.harness import distributed
from tests.engine.test_gradients import assert_equal
from tests.training.models import build, optimizer_for, weights
from tests.training.three_ways import new_pipeline, train_steps

Saved = tuple[dict[str, Tensor], dict[str, Any]]

LAGGING = ExchangeOptions(compressor=Int4())
DENSE = ExchangeOptions()
OTHERS = (
    DENSE,
    ExchangeOptions(compressor=Int4(halves="reduce")),
    ExchangeOptions("gradients", compressor=Int4()),
    ExchangeOptions("gradients"),
)


def _save(
    options: ExchangeOptions, dtype: torch.dtype = torch.float32, *, syncs: bool = False
) -> Saved:
    model = build("mlp", dtype=dtype)
    pipeline = new_pipeline(model, optimizer_for("adamw", model), options=options)
    train_steps(pipeline, model, [0] * 3)
    if syncs:
        pipeline.parts[0].sync_replicas()
    pipeline.complete_parameters()
    saved = copy.deepcopy((model.state_dict(), pipeline.parts[0].optimizer_state_dict()))
    pipeline.detach()
    return saved


def _resume(
    options: ExchangeOptions, saved: Saved, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], int]:
    """Weights after two steps, and how often this rank was told that masters are dropped."""
    model = build("mlp", seed=1, dtype=dtype)
    optimizer = optimizer_for("adamw", model)
    pipeline = new_pipeline(model, optimizer, options=options)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(copy.deepcopy(saved[1]))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train_steps(pipeline, model, [0] * 2)
    state = pipeline.parts[0].optimizer_state_dict()["state"]
    keeps = options.encodes_differences or (dtype.itemsize < 4 and not options.is_of_gradients)
    assert all((MASTER_KEY in own) is keeps for own in state.values())
    pipeline.detach()
    told = [one for one in said if "Its masters (" in str(one.message)]
    return weights(model), len(told)


def _without_masters(saved: Saved) -> Saved:
    without = copy.deepcopy(saved)
    for own in without[1]["state"].values():
        del own[MASTER_KEY]
    return without


@distributed(world_sizes=(2,))
def test_where_weights_lag_behind_them_rank_0_says_so_once() -> None:
    saved = _save(LAGGING)
    is_first = dist.get_rank() == 0
    for options in OTHERS:
        resumed, count = _resume(options, saved)
        assert count == is_first, options
        expected, count = _resume(options, _without_masters(saved))
        assert count == 0
        assert_equal(resumed, expected)
    assert _resume(LAGGING, saved)[1] == 0


@distributed(world_sizes=(2,))
def test_where_they_are_the_weights_nothing_is_lost_and_nothing_said() -> None:
    saved = _save(LAGGING, syncs=True)
    assert all(MASTER_KEY in own for own in saved[1]["state"].values())
    for options in OTHERS:
        assert _resume(options, saved)[1] == 0, options


@distributed(world_sizes=(2,))
def test_what_16_bits_round_is_said_too() -> None:
    saved = _save(DENSE, torch.bfloat16)
    assert _resume(DENSE, saved, torch.bfloat16)[1] == 0
    for options in (DENSE, ExchangeOptions("gradients")):
        assert _resume(options, saved)[1] == (dist.get_rank() == 0), options


@distributed(world_sizes=(2,))
def test_masters_of_16_bits_that_weights_lag_behind_are_lost_where_nothing_lags() -> None:
    saved = _save(LAGGING, torch.bfloat16)
    assert _resume(LAGGING, saved, torch.bfloat16)[1] == 0
    for options in (DENSE, ExchangeOptions(compressor=Int4(halves="reduce"))):
        assert _resume(options, saved, torch.bfloat16)[1] == (dist.get_rank() == 0), options
    synced = _save(LAGGING, torch.bfloat16, syncs=True)
    assert _resume(DENSE, synced, torch.bfloat16)[1] == 0


@distributed(world_sizes=(1,))
def test_the_message_names_the_way_out() -> None:
    saved = _save(LAGGING)
    model = build("mlp")
    optimizer = optimizer_for("adamw", model)
    pipeline = new_pipeline(model, optimizer)
    optimizer.load_state_dict(saved[1])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train_steps(pipeline, model, [0])
    (told,) = [str(one.message) for one in said if MASTER_KEY in str(one.message)]
    for word in ("dropped", "resume with the compressor, gather and precision", "sync_replicas()"):
        assert word in told
