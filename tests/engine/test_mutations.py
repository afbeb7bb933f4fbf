"""The safeguards are needed: with one removed, training reads stale weights or loses gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_dear.engine import parameter_gatherer
from lightning_dear.engine.gradient_collector import GradientCollector
from lightning_dear.optimizers import sharded
from tests.distributed.harness import run_ranks
from tests.training.delays import Delays
from tests.training.three_ways import train_dear, train_reference

LATE = Delays(before_all_gather_s=0.05)


def _without_wait(self: Any, *args: Any, **kwargs: Any) -> None:
    return None


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


MUTATIONS: dict[str, tuple[str, Callable[[], Any]]] = {
    # What is removed: a model that shows it, and how it is removed.
    "gate": (
        "functional",
        lambda: mock.patch.object(parameter_gatherer._Reader, "close", _nothing),
    ),
    "pre-forward wait": (
        "held_list",
        lambda: mock.patch.object(parameter_gatherer._Reader, "__call__", _nothing),
    ),
    "every wait": (
        "mlp",
        lambda: mock.patch.object(parameter_gatherer.ParameterGatherer, "complete", _without_wait),
    ),
    "counting of gradients": (
        "reentrant",
        lambda: mock.patch.object(
            GradientCollector,
            "on_gradient",
            lambda self, index: self._collect(index),
        ),
    ),
    "scaling by 1/P": (
        "mlp",
        lambda: mock.patch.object(torch, "_foreach_mul", lambda tensors, factor: tensors),
    ),
    "stepping every bucket": (
        "mlp",
        lambda: mock.patch.object(sharded, "inner_step", return_value=_nothing),
    ),
}


def _agrees(model: str, mutation: str | None) -> bool:
    """Whether training gives the reference's weights; errors count as disagreement."""
    theirs = train_reference(model, "sgd", 3, dist.get_world_size())
    try:
        with nullcontext() if mutation is None else MUTATIONS[mutation][1]():
            ours = train_dear(model, "sgd", 3, delays=LATE)
    except RuntimeError:
        return False
    return all(
        torch.allclose(a, b, rtol=1e-6, atol=1e-7)
        for left, right in zip(ours[0], theirs[0], strict=True)
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("model", sorted({model for model, _ in MUTATIONS.values()}))
def test_unmutated_code_agrees(model: str) -> None:
    assert run_ranks(_agrees, 2, model, None) == [True, True]


@pytest.mark.parametrize("mutation", sorted(MUTATIONS))
def test_removing_a_safeguard_is_seen(mutation: str) -> None:
    model = MUTATIONS[mutation][0]
    assert run_ranks(_agrees, 2, model, mutation) == [False, False]
