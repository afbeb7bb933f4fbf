"""What a rank keeps between steps, against formulas written out in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_dear.compression import (
    DGC,
    QSGD,
    Codec,
    Fp32,
    Int4,
    Int8,
    LoCo,
    RandomK,
    SignSGD,
    Signum,
    TopK,
)
from lightning_dear.compression.error_feedback import Encoded, Memory, Residual

NUMEL = 512
CPU = torch.device("cpu")


def _send(
    memory: Memory,
    codec: Codec,
    gradient: Tensor,
    scale: float | None = None,
    seed: int | None = None,
) -> tuple[Tensor, Tensor]:
    """What is encoded and what arrives, of one row; `gradient` is multiplied by `scale`."""
    how = Encoded(codec, seed)
    factor = None if scale is None else torch.full((1,), scale)
    row = (gradient if scale is None else gradient * scale).float()[None].clone()
    memory.compensate(row, factor)
    wire = torch.empty((1, codec.wire_bytes(row.shape[1])), dtype=torch.uint8)
    codec.encode(row, wire, how.generator(CPU))
    memory.note_sent(row, wire, how, factor)
    decoded = torch.empty_like(row)
    how.decode(wire, decoded)
    return row[0], decoded[0] if scale is None else decoded[0] / scale


def _gradients(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(NUMEL, generator=generator) ** 3 for _ in range(count)]


@pytest.mark.parametrize("rate", [1.0, 0.5, 0.1])
@pytest.mark.parametrize("codec", [Int4(block_size=64), TopK(density=0.05)])
def test_feedback_sends_everything_in_the_end(codec: Codec, rate: float) -> None:
    memory = Residual(NUMEL, CPU, rate)
    arrived, total = torch.zeros(NUMEL).double(), torch.zeros(NUMEL).double()
    for gradient in _gradients(30):
        _, sent = _send(memory, codec, gradient)
        memory.commit()
        arrived += sent
        total += gradient
    left = total - arrived
    torch.testing.assert_close(memory.kept["residual"].double() / rate, left, rtol=1e-4, atol=1e-3)


def test_dgc_sends_all_of_its_velocity() -> None:
    """sum of what was sent + v = sum of u, with u = momentum u + g set to 0 where v was sent."""
    codec = DGC(density=0.05, selector="exact", momentum=0.9)
    memory = codec.worker_memory(NUMEL, CPU)
    u, v = torch.zeros(NUMEL).double(), torch.zeros(NUMEL).double()
    arrived, velocity = torch.zeros(NUMEL).double(), torch.zeros(NUMEL).double()
    for gradient in _gradients(30):
        encoded, sent = _send(memory, codec, gradient)
        memory.commit()
        u = 0.9 * u + gradient
        v = v + u
        velocity += u
        torch.testing.assert_close(encoded.double(), v, rtol=1e-4, atol=1e-4)
        was_sent = sent != 0
        u[was_sent] = 0
        v[was_sent] = 0
        arrived += sent
    torch.testing.assert_close(memory.kept["momentum"].double(), u, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(arrived + memory.kept["residual"], velocity, rtol=1e-5, atol=1e-4)


def test_signum_keeps_a_running_mean() -> None:
    codec = Signum(momentum=0.8)
    memory = codec.worker_memory(NUMEL, CPU)
    mean = torch.zeros(NUMEL).double()
    for gradient in _gradients(10):
        encoded, _ = _send(memory, codec, gradient)
        memory.commit()
        mean = 0.8 * mean + 0.2 * gradient
        torch.testing.assert_close(encoded.double(), mean, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "codec",
    [Int8(block_size=64), TopK(density=0.05), DGC(density=0.05, selector="exact"), Signum()],
)
def test_two_rounds_of_a_step_count_once(codec: Codec) -> None:
    """A step's gradients that are sent one after the other move momentum on by one step."""
    memory = codec.worker_memory(NUMEL, CPU)
    gradients = _gradients(8)
    arrived, total = torch.zeros(NUMEL).double(), torch.zeros(NUMEL).double()
    mean = torch.zeros(NUMEL).double()
    for one, other in zip(gradients[::2], gradients[1::2], strict=True):
        for gradient in (one, other):
            arrived += _send(memory, codec, gradient)[1]
            total += gradient
        mean = 0.9 * mean + 0.1 * (one + other)
        memory.commit()
    if isinstance(codec, Signum):
        torch.testing.assert_close(memory.kept["running_mean"].double(), mean, rtol=1e-4, atol=1e-5)
    elif not isinstance(codec, DGC):
        left = memory.kept["residual"].double()
        torch.testing.assert_close(arrived + left, total, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("scale", [None, 4.0])
def test_what_waits_fades_once_a_step(scale: float | None) -> None:
    """x = g + g' + decay e for a step of two rounds, and a step that is left out fades nothing."""
    codec, seed = RandomK(density=0.05, decay=0.5), iter(range(2**40, 2**41))
    memory, residual = codec.worker_memory(NUMEL, CPU), torch.zeros(NUMEL).double()
    gradients = _gradients(12)
    for one, other in zip(gradients[::2], gradients[1::2], strict=True):
        _send(memory, codec, one, scale, next(seed))
        memory.discard()
        arrived = torch.zeros(NUMEL).double()
        for gradient in (one, other):
            arrived += _send(memory, codec, gradient, scale, next(seed))[1]
        memory.commit()
        residual = one.double() + other + 0.5 * residual - arrived
        kept = memory.kept["residual"].double()
        torch.testing.assert_close(kept, residual, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("decay", "most"), [(0.6, 2.5), (1.0, 20.0)])
def test_a_steady_gradient_arrives_as_so_many_as_it_says(decay: float, most: float) -> None:
    codec, gradient = RandomK(density=0.05, decay=decay), torch.ones(NUMEL)
    memory, arrived = codec.worker_memory(NUMEL, CPU), []
    for step in range(60):
        arrived.append(_send(memory, codec, gradient, seed=2**40 + step)[1])
        memory.commit()
    sums = torch.stack(arrived[20:])
    mean = float(sums[sums != 0].mean())
    assert codec.gradients_at_once == pytest.approx(most)
    assert 0.8 * most <= mean <= 1.25 * most


def test_two_rounds_of_dgc_are_one_step_of_momentum() -> None:
    codec = DGC(density=1.0, selector="exact", momentum=0.5)
    memory, dense = codec.worker_memory(NUMEL, CPU), Fp32()
    u = torch.zeros(NUMEL).double()
    for one, other in zip(_gradients(6)[::2], _gradients(6)[1::2], strict=True):
        # Dense, so that nothing is masked: SGD with momentum.
        sent = _send(memory, dense, one)[1] + _send(memory, dense, other)[1]
        memory.commit()
        u = 0.5 * u + one + other
        torch.testing.assert_close(sent.double(), u, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "codec",
    [Int8(block_size=64), TopK(density=0.05), DGC(density=0.05, selector="exact"), Signum()],
)
def test_a_loss_scale_is_not_kept(codec: Codec) -> None:
    plain, scaled = codec.worker_memory(NUMEL, CPU), codec.worker_memory(NUMEL, CPU)
    for step, gradient in enumerate(_gradients(6)):
        sent = _send(plain, codec, gradient)[1]
        other = _send(scaled, codec, gradient, 2.0 ** (step % 3))[1]
        if codec.kind != "vote":
            assert torch.equal(sent, other)
        plain.commit()
        scaled.commit()
        for name, kept in plain.kept.items():
            assert torch.equal(kept, scaled.kept[name])


@pytest.mark.parametrize("codec", [Int8(), TopK(), DGC(selector="exact"), Signum(), LoCo()])
def test_what_is_discarded_leaves_no_trace(codec: Codec) -> None:
    memory, other = codec.worker_memory(NUMEL, CPU), codec.worker_memory(NUMEL, CPU)
    for gradient in _gradients(4):
        _send(memory, codec, gradient * 5)
        memory.discard()
        sent, expected = _send(memory, codec, gradient)[1], _send(other, codec, gradient)[1]
        assert torch.equal(sent, expected)
        memory.commit()
        other.commit()
    for name, kept in memory.kept.items():
        assert torch.equal(kept, other.kept[name])


@pytest.mark.parametrize(
    "codec", [QSGD(), SignSGD(), Int8(error_feedback=False), RandomK(error_feedback=False)]
)
def test_without_feedback_nothing_is_kept(codec: Codec) -> None:
    assert not codec.worker_memory(NUMEL, CPU).kept
    assert not codec.owner_memory(NUMEL, CPU).kept


@pytest.mark.parametrize("codec", [Int8(), LoCo(rate=1.0)])
def test_what_is_added_is_sent(codec: Codec) -> None:
    memory = codec.owner_memory(NUMEL, CPU)
    memory.add(slice(3, 5), torch.ones(2))
    row = torch.zeros(1, NUMEL)
    memory.compensate(row, None)
    assert row[0, 2:6].tolist() == [0, 1, 1, 0]


def test_loco_is_int4_with_a_moving_average() -> None:
    codec, one = LoCo(block_size=64, rate=0.25), _gradients(1)[0][None]
    wires = [torch.empty((1, codec.wire_bytes(NUMEL)), dtype=torch.uint8) for _ in range(2)]
    codec.encode(one, wires[0])
    Int4(block_size=64).encode(one, wires[1])
    assert torch.equal(*wires)
    memory, before = codec.worker_memory(NUMEL, CPU), torch.zeros(NUMEL)
    for gradient in _gradients(5):
        encoded, sent = _send(memory, codec, gradient)
        memory.commit()
        after = 0.75 * before + 0.25 * (encoded - sent)
        torch.testing.assert_close(memory.kept["residual"], after)
        before = after.clone()
    with pytest.raises(ValueError, match="rate of loco must be in"):
        LoCo(rate=0.0)


def test_what_is_sent_as_it_is_leaves_what_the_average_says() -> None:
    for codec, left in ((Int4(), 0.0), (LoCo(rate=0.25), 0.75)):
        memory = codec.owner_memory(NUMEL, CPU)
        memory.add(slice(0, NUMEL), torch.ones(NUMEL))
        before = memory.kept["residual"].clone()
        memory.note_all_sent(but=[slice(2, 4)])
        after = memory.kept["residual"]
        torch.testing.assert_close(after[2:4], before[2:4], rtol=0.01, atol=0)
        torch.testing.assert_close(after[4:], left * before[4:], rtol=0.01, atol=0)
