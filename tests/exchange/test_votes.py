"""Votes: one a step, and of every rank."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist

from lightning_dear.compression import Codec, SignSGD, Signum
from lightning_dear.exchange.options import ExchangeOptions
from tests.distributed.harness import distributed
from tests.training.linear import SOMETIMES, Run, gradients_of
from tests.training.models import weights


@distributed(world_sizes=(2,))
def test_votes_are_not_encoded_twice() -> None:
    run = Run(ExchangeOptions("gradients", compressor=SignSGD()))
    run.step()
    run.backward()
    run.part.mean.expose()
    with pytest.raises(RuntimeError, match="would be encoded twice"):
        run.backward(step=7)


@pytest.mark.parametrize("codec", [SignSGD(), Signum()], ids=lambda one: one.name)
@distributed(world_sizes=(1, 2))
def test_votes_of_a_second_round_are_refused_on_all_ranks(codec: Codec) -> None:
    run = Run(ExchangeOptions("gradients", compressor=codec))
    for step in range(2):
        before = copy.deepcopy(weights(run.model))
        # In the first step the first backward is reduced at once, later the second one is late.
        run.backward()
        run.backward(step=7)
        with pytest.raises(RuntimeError, match="no_backward_sync.*does not vote"):
            run.optimizer.step()
        run.optimizer.zero_grad()
        run.pipeline.complete_parameters()
        for old, new in zip(before, weights(run.model), strict=True):
            assert torch.equal(old, new), step
        run.step()


@distributed(world_sizes=(2,))
def test_a_second_vote_on_one_rank_alone_is_refused_on_all() -> None:
    run = Run(ExchangeOptions("gradients", compressor=SignSGD()))
    run.step()
    run.backward()
    if dist.get_rank() == 1:
        run.pipeline.complete_parameters()
        run.model.weights[0].sum().backward()
    with pytest.raises(RuntimeError, match="no_backward_sync"):
        run.optimizer.step()


@pytest.mark.parametrize("codec", [SignSGD(), Signum()], ids=lambda one: one.name)
@distributed(world_sizes=(2,))
def test_votes_without_a_gradient_do_not_count(codec: Codec) -> None:
    """As where a backward belongs to another optimizer, before this one's or after it."""
    plain, other = (Run(ExchangeOptions("gradients", compressor=codec)) for _ in range(2))
    for step in range(4):
        plain.step()
        if step % 2:
            _backward_of_nothing(other)
        other.step(before=partial(_backward_of_nothing, other))
    plain.pipeline.complete_parameters()
    other.pipeline.complete_parameters()
    for left, right in zip(weights(plain.model), weights(other.model), strict=True):
        assert torch.equal(left, right)


def _backward_of_nothing(run: Run) -> None:
    run.part.mean.reduce()
    with run.pipeline.backward():
        pass
    run.part.mean.reduce()


@pytest.mark.parametrize("reads", [True, False], ids=["", "as on NCCL"])
@distributed(world_sizes=(2, 3))
def test_a_gradient_that_one_rank_lacks_is_refused_on_all(reads: bool) -> None:
    """Zeros are votes for +1: two ranks would go uphill wherever the other one has a minus."""
    run = Run(ExchangeOptions("gradients", compressor=SignSGD()))
    run.step()
    run.pipeline.complete_parameters()
    run.pipeline.collectives.wait_blocks_host = reads
    before = copy.deepcopy(weights(run.model))
    _backward_without(run, is_left_out=dist.get_rank() == 1)
    with pytest.raises(RuntimeError, match=rf"gradient for 'weights.{SOMETIMES}' and others"):
        run.optimizer.step()
    run.optimizer.zero_grad()
    for old, new in zip(before, weights(run.model), strict=True):
        assert torch.equal(old, new)
    run.step()
    # What no rank has is not voted on.
    _backward_without(run, is_left_out=True)
    run.optimizer.step()


def _backward_without(run: Run, *, is_left_out: bool) -> None:
    gradients = gradients_of(7, dist.get_rank(), leaves_out=is_left_out)
    with run.pipeline.forward():
        loss = run.model(gradients)
    with run.pipeline.backward():
        loss.backward()
