"""Numbers that wait for their turn arrive as sums: what people hear of it, and that it trains."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, RMSprop

from lightning_dear.compression import (
    COMPRESSORS,
    DGC,
    Compressor,
    Int8,
    OkTopk,
    PowerSGD,
    RandomK,
    TopK,
    resolve_compressor,
)
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.strategy import refusals
from tests.distributed.harness import distributed
from tests.lightning.fitting import dear as dear_of_trainer
from tests.lightning.fitting import fit
from tests.lightning.nets import Net
from tests.training.waiting import clouds, train

WEIGHTS = [nn.Parameter(torch.ones(3))]


def _heard(compressor: Compressor | None, *optimizers: Optimizer, num_ranks: int = 2) -> list[str]:
    said: list[str] = []
    with mock.patch.object(refusals, "rank_zero_info", said.append):
        options = ExchangeOptions("gradients", compressor=compressor)
        refusals.say_what_waits(options, optimizers, num_ranks)
    return said


def _usual() -> SGD:
    return SGD(WEIGHTS, lr=0.05, momentum=0.9)


@pytest.mark.parametrize(
    ("compressor", "optimizer", "words"),
    [
        (
            TopK(),
            _usual(),
            r"'topk' training learns more slowly.* density=0.01 .* 100 steps.* 100 gradients: a"
            r" step of SGD .* 100 times as large, and momentum=0.9 makes it 10 times that\. If"
            r" the loss rises, divide lr=0.05 by up to 100, lower momentum, or set a larger",
        ),
        (
            RandomK(),
            _usual(),
            r"100 steps.* 2.5 gradients \(older ones have faded\): .* divide lr=0.05 by up to 2.5",
        ),
        (RandomK(decay=1.0), _usual(), "100 gradients: .* divide lr=0.05 by up to 100, lower"),
        (
            DGC(density=0.01),
            SGD(WEIGHTS, lr=0.1),
            "100 times as large, and momentum=0.9 makes it 10 times that",
        ),
        (TopK(), SGD(WEIGHTS, lr=0.1), "100 times as large. If .* by up to 100, or set a larger"),
        (
            OkTopk(density=0.02),
            SGD(WEIGHTS, lr=0.1, momentum=0.5, dampening=0.5),
            "50 gradients: .* momentum=0.5 makes it 1 times that",
        ),
        (TopK(), AdamW(WEIGHTS), "100 gradients. The steps of AdamW do not grow with it.$"),
        (TopK(), RMSprop(WEIGHTS), "100 gradients.$"),
    ],
)
def test_people_hear_how_late_and_how_large(
    compressor: Compressor, optimizer: Optimizer, words: str
) -> None:
    (said,) = _heard(compressor, optimizer, optimizer)
    assert re.search(words, said), said


@pytest.mark.parametrize(
    "compressor", [None, Int8(), PowerSGD(), TopK(density=0.6), TopK(error_feedback=False)]
)
def test_nobody_hears_of_what_does_not_wait(compressor: Compressor | None) -> None:
    assert not _heard(compressor, _usual())


def test_with_one_rank_only_codecs_let_numbers_wait() -> None:
    assert _heard(TopK(), _usual(), num_ranks=1)
    assert not _heard(OkTopk(), _usual(), num_ranks=1)


def test_all_compressors_with_a_density_say_it() -> None:
    known = [one for one in map(resolve_compressor, COMPRESSORS) if one is not None]
    assert {one.name for one in known if _heard(one, SGD(WEIGHTS, lr=0.1))} == {
        one.name for one in known if one.has_density
    }


@distributed([1, 2])
def test_a_trainer_says_it_once() -> None:
    with mock.patch.object(refusals, "rank_zero_info") as said:
        fit(dear_of_trainer(compressor="randomk"), Net("mlp", "sgd"))
    heard = [call.args[0] for call in said.call_args_list]
    assert len([one for one in heard if "training learns more slowly" in one]) == 1


@distributed([2, 3])
def test_randomk_trains_with_a_usual_sgd() -> None:
    before, after = train(RandomK(), 0.9, clouds, num_steps=120)
    assert after < before / 3
    # Where nothing fades, steps that are 100 times as large undo what was learned.
    before, after = train(RandomK(decay=1.0), 0.9, clouds, num_steps=120)
    assert not after < before / 2
