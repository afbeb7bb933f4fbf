"""Local steps with compressors: one anchor on all ranks, and nothing is lost in what is sent."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, AdamW

from lightning_dear import DearStrategy
from lightning_dear.compression import COMPRESSORS, DGC, Codec, RandomK, resolve_compressor
from lightning_dear.local_steps import LocalSteps
from tests.distributed.harness import distributed
from tests.local_steps.test_law import FRAGMENTS, Ours


def fits(compressor: Any) -> bool:
    try:
        DearStrategy(compressor=compressor, local_steps=4)
    except ValueError:
        return False
    return True


def keeps_all(compressor: Any) -> bool:
    """Whether the residual is all that was not sent. RandomK's decays, and DGC has momentum."""
    keeps = getattr(compressor, "has_feedback", False) and not compressor.is_identity
    return bool(keeps) and not isinstance(compressor, RandomK | DGC)


def _variants() -> dict[str, Any]:
    """Every compressor as it is, and with the reduce half alone."""
    found = {name: resolve_compressor(name) for name in COMPRESSORS}
    for name, codec in list(found.items()):
        if isinstance(codec, Codec):
            with suppress(TypeError, ValueError):
                found[f"{name}, reduce"] = type(codec)(halves="reduce")
    return found


VARIANTS = _variants()
FIT = {name: one for name, one in VARIANTS.items() if fits(one)}


def test_which_compressors_fit() -> None:
    assert {"int8", "int4", "bf16", "topk, reduce", "int8, reduce"} <= {*FIT}
    assert not {"signum", "oktopk", "powersgd", "topk"} & {*FIT}


def digest(anchor: dict[str, Tensor]) -> str:
    return hashlib.sha256(b"".join(one.numpy().tobytes() for one in anchor.values())).hexdigest()


@pytest.mark.parametrize("compressor", FIT)
@distributed(world_sizes=(2, 3))
def test_all_ranks_have_one_anchor_after_every_merge(compressor: str) -> None:
    steps = LocalSteps(every=4, fragments=FRAGMENTS[2], delay=1, mix=0.5)
    ours = Ours(steps, partial(AdamW, lr=0.01), FIT[compressor])
    seen = set()
    for number in range(1, 13):
        ours.run([number])
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, digest(ours.anchor))
        assert len({*everyone}) == 1
        seen.add(everyone[0])
    assert len(seen) > 3
    ours.outer.finish()
    dist.all_gather_object(
        everyone, digest({n: p.detach() for n, p in ours.model.named_parameters()})
    )
    assert len({*everyone}) == 1
    ours.outer.detach()


def total(value: Tensor) -> Tensor:
    dist.all_reduce(value)
    return value


@pytest.mark.parametrize("compressor", [name for name, one in FIT.items() if keeps_all(one)])
@distributed(world_sizes=(2, 3))
def test_what_was_sent_and_what_is_left_is_what_ranks_had(compressor: str) -> None:
    steps = LocalSteps(every=2, fragments=1, delay=0, mix=0.0, outer=partial(SGD, lr=1.0))
    ours = Ours(steps, partial(SGD, lr=0.1), FIT[compressor])
    (fragment,) = ours.outer.fragments
    world, size = dist.get_world_size(), 0.0
    for number in range(1, 9):
        ours.train(number)
        coded_buckets = fragment._exchange.coded
        before = [one.bucket.shard.clone() for one in coded_buckets]
        left = [one.worker.kept["residual"].clone() for one in coded_buckets]
        own = {
            name: (ours.anchor[name] - value.detach()) / world
            for name, value in ours.model.named_parameters()
        }
        ours.outer.after_step(ours.optimizer)
        for number_of, coded in enumerate(coded_buckets if number % 2 == 0 else ()):
            sent = torch.zeros(coded.spec.padded_numel)
            sent[coded.own] = before[number_of] - coded.bucket.shard
            rest = coded.whole_of(coded.worker.kept["residual"] - left[number_of]) / coded.rate
            found = total(sent + rest)
            for part in coded.spec.slices:
                flat = own[fragment.names[part.tensor]].flatten()[part.start : part.stop]
                wanted, place = total(flat.clone()), slice(part.offset, part.offset + part.numel)
                assert torch.allclose(found[place], wanted, atol=2e-6), compressor
                size = max(size, float(wanted.abs().max()))
    assert size > 1e-3
    ours.outer.detach()
