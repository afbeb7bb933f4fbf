"""Trainings with one sparse bucket, and what is in it."""

from __future__ import annotations

import copy
import hashlib
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dear.compression import OkTopk
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.exchange.sparse.bucket import SparseBucket
from lightning_dear.planning import SingleFusion
from tests.training.linear import Run

STATIC = OkTopk(density=0.05, mode="static")
BOTH_MODES = (OkTopk(density=0.05, tau_prime=3), STATIC)
NO_CAPS: dict[str, Any] = {"message_cap": math.inf, "owner_cap": math.inf}


def run_of(codec: OkTopk, **options: Any) -> Run:
    return Run(ExchangeOptions("gradients", compressor=codec, **options), SingleFusion())


def buckets_of(run: Run) -> list[SparseBucket]:
    assert run.part.plans.active is not None
    coded = run.part.plans.active.exchange.coded
    assert all(isinstance(one, SparseBucket) for one in coded)
    return list(coded)  # type: ignore[arg-type]


def in_bucket(run: Run, tensors: list[Tensor | None]) -> Tensor:
    """What stands in tensors, as it lies in the only bucket, fp32."""
    assert run.part.plan is not None
    (spec,) = run.part.plan.buckets
    flat = torch.zeros(spec.padded_numel)
    places = {id(parameter): at for at, parameter in enumerate(run.model.weights)}
    for piece in spec.slices:
        one = tensors[places[id(run.part.parameters[piece.tensor])]]
        if one is not None:
            flat[piece.offset : piece.offset + piece.numel] = one.detach().flatten()
    return flat


def check_all_alike(run: Run) -> None:
    """All ranks hold the same weights, bit for bit."""
    run.pipeline.complete_parameters()
    flat = torch.cat([weight.detach().flatten() for weight in run.model.weights])
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, hashlib.sha256(flat.numpy().tobytes()).hexdigest())
    assert len(set(digests)) == 1


def check_resumed_has_the_same_bits(run: Run, resumed: Run) -> None:
    """A new run that loads what `run` saves now steps as that one does."""
    state = copy.deepcopy(run.part.optimizer_state_dict())
    resumed.resume(run)
    resumed.optimizer.load_state_dict(state)
    for one in (run, resumed):
        for _ in range(5):
            one.step()
        one.pipeline.complete_parameters()
    pairs = zip(run.model.weights, resumed.model.weights, strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
