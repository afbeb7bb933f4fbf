"""Codecs on a CUDA device: nothing waits for it, and bytes mean what they mean on a CPU."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dear.collectives.factory import new_collectives
from lightning_dear.compression import CODECS, Codec, Compressor, PowerSGD, resolve_compressor
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions, default_gather
from tests.benchmarks import codecs as benchmark
from tests.compression.battery import Again
from tests.compression.formulas import LEVELS, rounding_of_means
from tests.compression.low_rank import ROUNDING, SHAPES, Channel
from tests.compression.properties import PROPERTIES
from tests.distributed.harness import run_ranks
from tests.training.models import batch, build, loss_of, optimizer_for
from tests.training.three_ways import SMALL_BUCKETS

pytestmark = pytest.mark.gpu

ROWS = torch.randn(3, 4097, generator=torch.Generator().manual_seed(0))
"""Of which no two numbers of a row are as large: top-k has no choice."""

OF_CODECS = {name: PROPERTIES[name].instances for name in CODECS}
INSTANCES = [one for instances in OF_CODECS.values() for one in instances]

EQUAL_BYTES = ("fp32", "fp16", "bf16", "signsgd", "signum")
"""Each number for itself, by comparisons or one rounding that IEEE 754 defines."""

INTEGERS = ("int8", "int4", "loco")
"""torch multiplies by 1 / L on CUDA where a CPU divides by L: a scale may be its neighbour, and
what lies half-way between two integers may be rounded to the other one."""

EQUAL_NUMBERS = ("topk", "dgc")
"""Places come in another order."""


@contextmanager
def no_wait() -> Iterator[None]:
    """Whatever makes the host wait for the device raises, as far as torch notices."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _generator(codec: Codec, device: str) -> torch.Generator | None:
    return None if codec.randomness == "none" else torch.Generator(device).manual_seed(7)


def _encoded(codec: Codec, rows: Tensor) -> Tensor:
    wire = torch.zeros(
        len(rows), codec.wire_bytes(rows.shape[1]), dtype=torch.uint8, device=rows.device
    )
    codec.encode(rows, wire, _generator(codec, rows.device.type))
    return wire


def _decoded(codec: Codec, wire: Tensor) -> Tensor:
    rows = torch.full(ROWS.shape, torch.nan, device=wire.device)
    codec.decode(wire, rows, _generator(codec, wire.device.type))
    return rows


@pytest.mark.parametrize("codec", INSTANCES, ids=repr)
def test_nothing_waits_for_the_device(codec: Codec) -> None:
    rows = ROWS.cuda()
    wire = torch.zeros(3, codec.wire_bytes(rows.shape[1]), dtype=torch.uint8, device="cuda")
    back = torch.full_like(rows, torch.nan)
    generators = [_generator(codec, "cuda") for _ in range(2)]
    with no_wait():
        codec.encode(rows, wire, generators[0])
        codec.decode(wire, back, generators[1])
    assert torch.isfinite(back).all()


def test_waiting_is_noticed_and_allowed_again() -> None:
    number = torch.ones(1, device="cuda")
    before = torch.cuda.get_sync_debug_mode()
    with pytest.raises(RuntimeError, match="synchronizing"), no_wait():
        number.item()
    assert torch.cuda.get_sync_debug_mode() == before
    assert number.item() == 1.0


@pytest.mark.parametrize("codec", INSTANCES, ids=repr)
def test_a_cpu_decodes_the_same_numbers(codec: Codec) -> None:
    """One multiplication of each, or none; what `randomk` draws, it draws on the CPU."""
    wire = _encoded(codec, ROWS.cuda())
    assert torch.equal(_decoded(codec, wire).cpu(), _decoded(codec, wire.cpu()))


@pytest.mark.parametrize("name", EQUAL_BYTES)
def test_bytes_are_those_of_a_cpu(name: str) -> None:
    for codec in OF_CODECS[name]:
        assert torch.equal(_encoded(codec, ROWS.cuda()).cpu(), _encoded(codec, ROWS))


@pytest.mark.parametrize("name", EQUAL_NUMBERS)
def test_numbers_are_those_of_a_cpu(name: str) -> None:
    for codec in OF_CODECS[name]:
        ours, theirs = _on_both(codec)
        assert torch.equal(ours, theirs), codec


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_those_of_a_cpu_but_for_ties(name: str) -> None:
    for codec in OF_CODECS[name]:
        ours, theirs = _on_both(codec)
        largest_scale = ROWS.abs().max() / LEVELS.get(name, LEVELS["int4"])
        assert ((ours - theirs).abs() <= (1 + 1e-5) * largest_scale).all(), codec
        assert _share_off(ours, theirs, Again(relative=2.0**-21)) <= 1e-3, codec


@pytest.mark.parametrize("name", ["efsignsgd", "onebit"])
def test_means_are_those_of_a_cpu_but_for_rounding(name: str) -> None:
    """Either is as near to the mean as sums in any order are."""
    for codec in OF_CODECS[name]:
        each = rounding_of_means(codec)
        both = Again(2 * each.relative, 2 * each.absolute)
        assert _share_off(*_on_both(codec), both) == 0, codec


def test_every_deterministic_codec_is_compared() -> None:
    compared = {*EQUAL_BYTES, *EQUAL_NUMBERS, *INTEGERS, "efsignsgd", "onebit"}
    assert compared == {name for name in CODECS if CODECS[name].randomness == "none"}


def _on_both(codec: Codec) -> tuple[Tensor, Tensor]:
    """What comes back of the same rows: on the device, and on a CPU."""
    ours = _decoded(codec, _encoded(codec, ROWS.cuda())).cpu()
    return ours, _decoded(codec, _encoded(codec, ROWS))


def _share_off(ours: Tensor, theirs: Tensor, bound: Again) -> float:
    lost = (ours.double() - theirs.double()).abs()
    return float((lost > bound.relative * theirs.double().abs() + bound.absolute).double().mean())


@pytest.mark.parametrize("shape", SHAPES)
def test_low_rank_is_that_of_a_cpu(shape: tuple[int, int]) -> None:
    """Whether its factorisation waits is not asked: that is the linear algebra library's."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    codec = PowerSGD(rank=2, min_saving=1.0)
    ours = Channel(codec, matrix.shape, "cuda").send(matrix.cuda()).cpu()
    theirs = Channel(codec, matrix.shape).send(matrix)
    assert float((ours - theirs).norm()) <= ROUNDING * float(matrix.norm())


# --- training, and the benchmark ------------------------------------------------------------------


def _losses(name: str) -> list[float]:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.destroy_process_group()
    dist.init_process_group("nccl", device_id=device)
    codec: Compressor | None = resolve_compressor(name)
    options = ExchangeOptions(default_gather(codec), compressor=codec)
    model = build("mlp").to(device)
    optimizer = optimizer_for("adamw", model)
    collectives = new_collectives(device)
    pipeline = Pipeline(model, [optimizer], collectives, SMALL_BUCKETS, options=options)
    losses = []
    for _ in range(6):
        inputs, targets = (one.to(device) for one in batch("mlp", 0, 0))
        with pipeline.forward():
            loss = loss_of(model, inputs, targets)
        with pipeline.backward():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("name", ["int8", "topk"])
def test_training_over_nccl_goes_down(name: str) -> None:
    """The same batch in every step, on one rank."""
    (losses,) = run_ranks(_losses, 1, name, timeout_s=120)
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]


def test_the_benchmark_runs(capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.main(["fp16", "--device", "cuda", "--mib", "1", "--repeats", "2"])
    assert "copy:" in capsys.readouterr().out
