"""What encoding costs is measured through training's own operations, and agreed on."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Generator, Tensor

from lightning_dear.collectives.work import Work
from lightning_dear.compression import DGC, Codec, Fp32, Int8, PowerSGD, SignSGD, Signum, TopK
from lightning_dear.exchange.low_rank import LowRankBucket
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import Linear, NoFusion
from lightning_dear.telemetry.device_work import device_work_s
from lightning_dear.tuning import codec_cost
from lightning_dear.tuning.codec_cost import fitted_line, launch_seconds, measure_codecs
from tests.distributed.harness import distributed
from tests.training.models import build, weights
from tests.training.three_ways import new_pipeline, train_steps

BOTH = ("parameters", "gradients")


class _Clock:
    """Marks are moments, which codecs set."""

    now_s = 0.0

    def mark(self) -> float:
        return self.now_s

    def seconds(self, mark: float) -> float:
        return mark


CLOCK = _Clock()


@dataclass(frozen=True, kw_only=True)
class _Timed(Int8):
    """Encoding takes 1 s and 2 us an element, decoding half of it."""

    def encode(self, rows: Tensor, wire: Tensor, generator: Generator | None = None) -> None:
        CLOCK.now_s += 1 + 2e-6 * rows.numel()
        super().encode(rows, wire, generator)

    def decode(self, wire: Tensor, rows: Tensor, generator: Generator | None = None) -> None:
        CLOCK.now_s += 0.5 + 1e-6 * rows.numel()
        super().decode(wire, rows, generator)


ENCODE_S, DECODE_S = 0.02, 0.04
SLEPT_S: dict[str, list[float]] = {"encode": [], "decode": []}
"""What sleeps really took, on a machine that may be busy."""


def _sleep(what: str, seconds: float) -> None:
    begin_s = time.perf_counter()
    time.sleep(seconds)
    SLEPT_S[what].append(time.perf_counter() - begin_s)


@dataclass(frozen=True, kw_only=True)
class _Sleeping(Int8):
    def encode(self, rows: Tensor, wire: Tensor, generator: Generator | None = None) -> None:
        _sleep("encode", ENCODE_S)
        super().encode(rows, wire, generator)

    def decode(self, wire: Tensor, rows: Tensor, generator: Generator | None = None) -> None:
        _sleep("decode", DECODE_S)
        super().decode(wire, rows, generator)


@dataclass(frozen=True, kw_only=True)
class _Slow(Int8):
    """Encoding takes 50 ms."""

    def encode(self, rows: Tensor, wire: Tensor, generator: Generator | None = None) -> None:
        time.sleep(0.05)
        super().encode(rows, wire, generator)


def _pipeline(codec: Codec | None, gather: str = "gradients") -> Any:
    model = build("mlp")
    options = ExchangeOptions(gather, compressor=codec)
    # Some codecs keep momentum themselves.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, new_pipeline(model, optimizer, NoFusion(), options=options)


def _line(alpha: float, beta: float) -> Any:
    return pytest.approx((alpha, beta), rel=1e-6)


@pytest.mark.parametrize("gather", BOTH)
@distributed(world_sizes=(2,))
def test_each_operation_is_timed_with_what_belongs_to_it(gather: str) -> None:
    model, pipeline = _pipeline(_Timed(), gather)
    train_steps(pipeline, model, [0])
    with (
        mock.patch.object(codec_cost, "clock_of", return_value=CLOCK),
        mock.patch.object(codec_cost, "launch_seconds", return_value=(0.0, 0.0)),
    ):
        costs = measure_codecs(pipeline)
    found = {
        name: (one.alpha, one.beta)
        for name in ("encode", "decode_sum", "encode_shard", "decode")
        for one in [getattr(costs.compressed, name)]
    }
    # What is not sent is found by decoding: of the whole bucket, and of the mean's shard.
    assert found["encode"] == _line(1.5, 3e-6)
    assert found["decode_sum"] == _line(0.5, 1e-6)
    keeps = gather == "gradients"
    assert found["encode_shard"] == (_line(1.5, 3e-6) if keeps else _line(1.0, 2e-6))
    assert found["decode"] == _line(0.5, 1e-6)
    assert costs.uncompressed.encode == costs.uncompressed.decode == Linear()
    pipeline.detach()


@pytest.mark.parametrize(
    ("codec", "gather"),
    [
        (Int8(), "parameters"),
        (Int8(halves="reduce"), "parameters"),
        (TopK(density=0.05), "gradients"),
        (DGC(density=0.05), "gradients"),
        (SignSGD(), "gradients"),
        (Signum(), "gradients"),
    ],
    ids=lambda one: f"{one.name}-{one.halves}" if isinstance(one, Codec) else one,
)
@distributed(world_sizes=(2,))
def test_ranks_agree_and_training_is_not_touched(codec: Codec, gather: str) -> None:
    model, pipeline = _pipeline(codec, gather)
    train_steps(pipeline, model, [0])
    pipeline.complete_parameters()
    before, state = weights(model), torch.get_rng_state()
    costs = measure_codecs(pipeline)
    assert all(one == costs for one in pipeline.collectives.all_gather_object(costs))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, weights(model), before))
    assert costs.may_mix is (codec.kind != "vote")
    one = costs.compressed
    assert one.encode.alpha + one.encode.beta > 0
    assert (one.gather_bytes is None) is (codec.halves == "reduce")
    numel = 1 << 11
    for wire in (one.reduce_bytes, one.gather_bytes):
        assert wire is None or wire.of(numel) == pytest.approx(codec.wire_bytes(numel), rel=0.1)
    plain = costs.uncompressed
    assert plain.gather_bytes is None
    assert plain.reduce_bytes == Linear(0.0, 4.0)
    pipeline.detach()


@distributed(world_sizes=(2,))
def test_starting_messages_costs_every_bucket_the_same() -> None:
    model, pipeline = _pipeline(_Timed())
    train_steps(pipeline, model, [0])
    with (
        mock.patch.object(codec_cost, "clock_of", return_value=CLOCK),
        mock.patch.object(codec_cost, "launch_seconds", return_value=(0.25, 2.0)),
    ):
        costs = measure_codecs(pipeline)
    one, plain = costs.compressed, costs.uncompressed
    assert (one.encode.alpha, one.decode_sum.alpha) == pytest.approx((1.75, 0.5))
    assert (one.encode_shard.alpha, one.decode.alpha) == pytest.approx((3.5, 0.5))
    assert [plain.encode, plain.decode_sum] == [Linear(0.25), Linear()]
    assert [plain.encode_shard, plain.decode] == [Linear(2.0), Linear()]
    pipeline.detach()


@distributed(world_sizes=(2,))
def test_starting_is_timed_without_waiting_and_counts_as_no_steps_bytes() -> None:
    model, pipeline = _pipeline(Int8())
    train_steps(pipeline, model, [0])
    pipeline.complete_parameters()
    collectives = pipeline.collectives
    is_slow = collectives.world.rank == 1

    def slowed(seconds: float, launch: Any) -> Any:
        def launched(*arguments: Any) -> Work:
            time.sleep(seconds * is_slow)
            work = launch(*arguments)

            def wait() -> None:
                time.sleep(0.1)
                work.wait()

            return Work(wait)

        return launched

    sent_before = collectives.ledger.total()
    slow_all_to_all = slowed(0.02, collectives.launch_all_to_all)
    slow_all_gather = slowed(0.04, collectives.launch_all_gather)
    with (
        mock.patch.object(codec_cost, "_NUM_LAUNCHES", 3),
        mock.patch.object(collectives, "launch_all_to_all", slow_all_to_all),
        mock.patch.object(collectives, "launch_all_gather", slow_all_gather),
    ):
        reduce_s, gather_s = launch_seconds(pipeline)
    assert 0.02 <= reduce_s < 0.1
    assert 0.04 <= gather_s < 0.1
    assert collectives.all_gather_object((reduce_s, gather_s)) == [(reduce_s, gather_s)] * 2
    assert collectives.ledger.total() == sent_before
    train_steps(pipeline, model, [1])
    pipeline.detach()


@pytest.mark.parametrize(
    ("gather", "num_encodings", "num_decodings"),
    [
        # What is not sent is found by decoding, but of a difference nothing is kept.
        ("gradients", 2, 4),
        ("parameters", 2, 3),
    ],
)
@distributed(world_sizes=(2,))
def test_encoding_is_the_devices_work(gather: str, num_encodings: int, num_decodings: int) -> None:
    model, pipeline = _pipeline(_Sleeping(), gather)
    for step in range(2):
        before_s = device_work_s()
        for slept in SLEPT_S.values():
            slept.clear()
        train_steps(pipeline, model, [step])
        pipeline.complete_parameters()
    num_buckets = len(pipeline.parts[0].plan.buckets)
    took_s = device_work_s() - before_s
    assert len(SLEPT_S["encode"]) == num_buckets * num_encodings
    assert len(SLEPT_S["decode"]) == num_buckets * num_decodings
    least_s = sum(map(sum, SLEPT_S.values()))
    assert least_s <= took_s < least_s + num_buckets * DECODE_S
    pipeline.detach()


@distributed(world_sizes=(2,))
def test_making_factors_is_the_devices_work() -> None:
    model, pipeline = _pipeline(PowerSGD())
    train_steps(pipeline, model, [0])

    def slowed(seconds: float, method: Any) -> Any:
        def took(*arguments: Any) -> Any:
            time.sleep(seconds)
            return method(*arguments)

        return took

    slow = {
        "encode_first": slowed(0.01, LowRankBucket.encode_first),
        "encode_second": slowed(0.02, LowRankBucket.encode_second),
    }
    with mock.patch.multiple(LowRankBucket, **slow):
        before_s = device_work_s()
        train_steps(pipeline, model, [1])
    num_buckets = len(pipeline.parts[0].plan.buckets)
    # Once each; twice would be 0.06 s a bucket.
    assert 0.03 * num_buckets <= device_work_s() - before_s < 0.05 * num_buckets
    pipeline.detach()


@distributed(world_sizes=(2,))
def test_with_an_identity_nothing_may_be_mixed() -> None:
    model, pipeline = _pipeline(Fp32(), "parameters")
    train_steps(pipeline, model, [0])
    assert not measure_codecs(pipeline).may_mix
    pipeline.detach()


@pytest.mark.parametrize("gather", BOTH)
@distributed(world_sizes=(2,))
def test_a_measured_step_is_without_encoding(gather: str) -> None:
    model, pipeline = _pipeline(_Slow(), gather)
    part = pipeline.parts[0]
    train_steps(pipeline, model, [0])
    for step in (1, 2):
        pipeline.measure_next_step()
        train_steps(pipeline, model, [step])
    assert len(part.plan.buckets) > 2
    times = part.timer.times
    for seconds in (times.backward_s, times.step_s, times.forward_s, *times.ready_s.values()):
        assert 0 <= seconds < 0.05
    assert (times.late_step_s > 0) is (gather == "gradients")
    pipeline.detach()


def test_lines_do_not_fall_and_begin_at_zero_or_above() -> None:
    assert fitted_line((10, 30), (3.0, 7.0)) == Linear(1.0, 0.2)
    assert fitted_line((10, 30), (1.0, 6.0)) == Linear(0.0, 0.2)
    assert fitted_line((10, 30), (4.0, 3.0)) == Linear(4.0, 0.0)


@distributed(world_sizes=(1,))
def test_who_plans_knows_whether_a_schedule_is_at_work() -> None:
    _, pipeline = _pipeline(Int8())
    (part,) = pipeline.parts
    assert part.uses_configured_compressor
    for codec, is_configured in ((Fp32(), False), (Int8(), True)):
        pipeline.use_compressor(codec)
        assert part.uses_configured_compressor is is_configured
    pipeline.detach()
