"""Weights that are put back in mid-run: training goes on from them, and from nothing else."""

from __future__ import annotations

import copy
import itertools
import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dear.compression import (
    QSGD,
    Bf16,
    Codec,
    Int4,
    Int8,
    OkTopk,
    PowerSGD,
    RandomK,
)
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.optimizers.masters import MASTER_KEY
from tests.distributed.harness import distributed
from tests.engine.test_gradients import assert_equal
from tests.training.lagging import LaggingEFSignSGD, LaggingTopK
from tests.training.linear import Run
from tests.training.models import build, optimizer_for, weights
from tests.training.three_ways import new_pipeline, train_steps

LAGGING = (Int8(), Int4(), Bf16(), LaggingEFSignSGD(), LaggingTopK(density=0.1))


class _Training:
    """A model, its optimizer, and what steps it."""

    def __init__(self, options: ExchangeOptions, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.model: nn.Module = build("mlp", dtype=dtype)
        self.optimizer = optimizer_for("adamw", self.model)
        self.pipeline: Pipeline = new_pipeline(self.model, self.optimizer, options=options)
        self.part = self.pipeline.parts[0]

    def step(self, number: int) -> list[Tensor]:
        train_steps(self.pipeline, self.model, [number])
        self.pipeline.complete_parameters()
        return weights(self.model)

    def run(self, steps: range) -> list[list[Tensor]]:
        return [self.step(number) for number in steps]

    def save(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Collective."""
        state = self.part.optimizer_state_dict()
        return copy.deepcopy((self.model.state_dict(), state))

    def load(self, saved: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
        self.model.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])


CASES = [
    *((ExchangeOptions(compressor=codec), torch.float32) for codec in LAGGING),
    (ExchangeOptions(compressor=Int8()), torch.bfloat16),
    (ExchangeOptions(), torch.bfloat16),
    (ExchangeOptions("gradients", compressor=Int8()), torch.float32),
]


COUNTING = [
    (ExchangeOptions("gradients", compressor=codec), torch.float32)
    for codec in (
        RandomK(density=0.2),
        QSGD(),
        PowerSGD(rank=1, min_saving=1.0),
        OkTopk(density=0.2),
    )
]
"""Of random numbers that go on from step to step, or a factor, or a threshold, that does."""


@distributed(world_sizes=(1, 2))
def test_a_state_from_before_the_first_step_starts_anew() -> None:
    """As callbacks restore one that look for a learning rate: nothing of the trial is left."""
    for options, dtype in (*CASES, *COUNTING):
        training = _Training(options, dtype)
        before = training.save()
        assert not before[1]["state"]
        first = training.run(range(3))
        training.load(before)
        for ours, theirs in zip(training.run(range(3)), first, strict=True):
            assert_equal(ours, theirs)
        training.load(before)
        # Nobody has stepped what was loaded.
        assert not training.save()[1]["state"]
        training.pipeline.detach()


@distributed(world_sizes=(2,))
def test_a_parameter_without_a_master_starts_from_its_weights() -> None:
    for options, dtype in CASES[:-1]:
        training = _Training(options, dtype)
        training.run(range(3))
        saved = training.save()
        del saved[1]["state"][0][MASTER_KEY], saved[1]["state"][3]
        training.run(range(3, 6))
        training.load(saved)
        own = [p for group in training.optimizer.param_groups for p in group["params"]]
        state = training.save()[1]["state"]
        assert 3 not in state
        assert torch.equal(state[0][MASTER_KEY], own[0].detach().float())
        for number in saved[1]["state"]:
            if number:
                master = saved[1]["state"][number][MASTER_KEY]
                assert torch.equal(state[number][MASTER_KEY], master), (options, number)
        training.pipeline.detach()


@distributed(world_sizes=(2,))
def test_weights_alone_come_back_from_a_divergence() -> None:
    """Their masters with them: not a number stays none, and a lag of huge numbers is huge."""
    for codec, rate in itertools.product(LAGGING, (1e9, 1e30, math.inf)):
        run = Run(ExchangeOptions(compressor=codec))
        run.step()
        run.pipeline.complete_parameters()
        before = weights(run.model)
        run.optimizer.param_groups[0]["lr"] = rate
        run.step()
        run.pipeline.complete_parameters()
        assert _largest(run) > 1e6 or not math.isfinite(_largest(run))
        run.optimizer.param_groups[0]["lr"] = 1.0
        with torch.no_grad():
            for weight, value in zip(run.model.weights, before, strict=True):
                weight.copy_(value)
        run.part.sync_replicas()
        assert_equal(weights(run.model), before)
        run.pipeline.detach()


def _largest(run: Run) -> float:
    return max(float(weight.detach().abs().max()) for weight in run.model.weights)


@distributed(world_sizes=(2,))
def test_weights_that_shrink_at_every_step_keep_their_lag() -> None:
    """A decay by hand: what differences have not brought is still to come."""
    for codec in (Int4(block_size=64), LaggingTopK(density=0.1)):
        _check_shrinking(codec)


def _check_shrinking(codec: Codec) -> None:
    run = Run(ExchangeOptions(compressor=codec))
    for _ in range(6):
        run.step()
        state = run.part.optimizer_state_dict()["state"]
        masters = [state[number][MASTER_KEY] for number in sorted(state)]
        lags = [a - b.detach() for a, b in zip(masters, run.model.weights, strict=True)]
        with torch.no_grad():
            for weight in run.model.weights:
                weight.mul_(0.9)
        state = run.part.optimizer_state_dict()["state"]
        for number, weight in enumerate(run.model.weights):
            left = state[number][MASTER_KEY] - weight.detach()
            limit = 1e-5 * float(masters[number].abs().max())
            torch.testing.assert_close(left, lags[number], rtol=0, atol=limit)
        assert any(bool(lag.any()) for lag in lags)


@distributed(world_sizes=(1, 2))
def test_what_is_saved_loaded_and_planned_under_inference_mode_is_trained_on() -> None:
    dense = [(ExchangeOptions(gather), torch.float32) for gather in ("parameters", "gradients")]
    for options, dtype in (*CASES, *dense):
        seen = []
        for context in (nullcontext, torch.inference_mode):
            training = _Training(options, dtype)
            training.run(range(2))
            with context():
                state = training.part.optimizer_state_dict()
                training.optimizer.load_state_dict(state)
                # Takes over what was loaded.
                training.part.sync_replicas()
            entries = itertools.chain(*(own.values() for own in state["state"].values()))
            assert not any(isinstance(one, Tensor) and one.is_inference() for one in entries)
            loaded = training.run(range(2, 3))
            with context():
                assert training.part.plan is not None
                training.part.replan(training.part.plan)
            seen.append([*loaded, *training.run(range(3, 4))])
            training.pipeline.detach()
        for ours, plain in zip(*seen, strict=True):
            assert_equal(ours, plain)
