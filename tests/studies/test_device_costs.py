"""What compressors are counted to cost on a device that is not here."""

from __future__ import annotations

import pytest

from lightning_dear.compression import CODECS, Int8, OkTopk, TopkA, resolve_compressor
from lightning_dear.planning import Linear
from lightning_dear.planning.measured import NO_CODEC
from lightning_dear.studies.device_costs import Device, halves_costs, total, whole_costs

GPU = Device(kernel_s=1e-5, bytes_per_s=1e11)
NUMEL = 1 << 22
CONTRACTIVE = ("efsignsgd", "onebit", "topk", "dgc")
SPARSE = ("oktopk", "topka", "topkdsa", "gtopk", "gaussiank")


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("costs_of", [halves_costs, whole_costs])
def test_every_codec_takes_time_and_kernels(name: str, costs_of) -> None:
    cost = costs_of(name, GPU, 8).compressed
    for part in (cost.encode, cost.decode_sum):
        assert part.alpha >= GPU.kernel_s
        # A byte of each element at least is read, or written.
        assert part.beta >= 1 / GPU.bytes_per_s / 8
    faster = costs_of(name, Device(1e-6, 1e12), 8).compressed
    assert faster.encode.of(NUMEL) == pytest.approx(cost.encode.of(NUMEL) / 10)


@pytest.mark.parametrize("name", CODECS)
def test_bytes_are_the_codecs_own(name: str) -> None:
    codec, world_size = resolve_compressor(name), 8
    sent = codec.wire_bytes(NUMEL // world_size)
    ours = halves_costs(name, GPU, world_size).compressed.of(NUMEL, 4, world_size)
    assert ours.reduce_bytes == pytest.approx(world_size * sent, rel=1e-3)
    assert ours.gather_bytes == ours.reduce_bytes
    whole = whole_costs(name, GPU, world_size).compressed.of(NUMEL, 4, world_size)
    if name in ("fp16", "bf16"):
        # Summed on the way, as DDP's hooks do.
        assert (whole.way, whole.reduce_bytes) == ("all_reduce", 2 * NUMEL)
    else:
        everyones = world_size * codec.wire_bytes(NUMEL)
        assert (whole.way, whole.gather_bytes) == ("all_gather", 0)
        assert whole.reduce_bytes == pytest.approx(everyones, rel=1e-3)


def test_what_is_counted_is_what_bf16_does() -> None:
    """Rounding reads 4 bytes and writes 2, and clips before; decoding the other way round."""
    cost = whole_costs("bf16", GPU, 4).compressed
    assert cost.decode_sum == Linear(GPU.kernel_s, 6 / GPU.bytes_per_s)
    assert cost.encode.alpha == pytest.approx(3 * GPU.kernel_s)


def test_what_is_summed_on_its_way_is_decoded_once() -> None:
    summed, others = (halves_costs(name, GPU, 8).compressed for name in ("randomk", "topk"))
    assert (summed.way, others.way) == ("half", "to_owners")
    # Decoding goes over a rank's own row, and over all rows.
    assert summed.decode_sum.beta == pytest.approx(summed.decode.beta / 8)
    adding = GPU.work(7, 12.0 * 7 / 8)
    assert others.decode_sum == total(others.decode, adding)


@pytest.mark.parametrize("name", CONTRACTIVE)
def test_error_feedback_is_paid_for(name: str) -> None:
    cost = halves_costs(name, GPU, 4).compressed
    assert cost.encode.of(NUMEL) > cost.decode.of(NUMEL) + GPU.work(3, 36.0).of(NUMEL)


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("world_size", [2, 3, 8, 64])
def test_sparse_all_reduces_send_their_usual_words(name: str, world_size: int) -> None:
    usual = 4 * resolve_compressor(name).usual_words(1 << 24, world_size)
    if name == "gtopk":
        # Up the tree, and then down: one after the other.
        usual *= 2
    for costs_of in (halves_costs, whole_costs):
        costs = costs_of(name, GPU, world_size)
        cost = costs.compressed.of(1 << 24, 4, world_size)
        share = (world_size - 1) / world_size
        assert (cost.reduce_bytes + cost.gather_bytes) * share == pytest.approx(usual)
        assert not costs.may_plan


def test_ok_topks_bytes_do_not_grow_and_topkas_do() -> None:
    def nbytes(compressor, world_size: int) -> float:
        cost = halves_costs(compressor, GPU, world_size).compressed.of(NUMEL, 4, world_size)
        return cost.reduce_bytes + cost.gather_bytes

    ok, all_of = OkTopk(density=0.01), TopkA(density=0.01)
    assert nbytes(ok, 256) == pytest.approx(nbytes(ok, 8), rel=1e-3)
    assert nbytes(all_of, 256) == pytest.approx(32 * nbytes(all_of, 8), rel=1e-3)


def test_no_compressor_costs_nothing_and_low_rank_cannot_be_told() -> None:
    assert halves_costs("none", GPU, 4) == whole_costs("none", GPU, 4) == NO_CODEC
    with pytest.raises(ValueError, match="cost of powersgd depends on the shapes"):
        halves_costs("powersgd", GPU, 4)
    with pytest.raises(ValueError, match="Leave halves out"):
        halves_costs(Int8(halves="reduce"), GPU, 4)
    with pytest.raises(ValueError, match="Unknown compressor 'int9'"):
        whole_costs("int9", GPU, 4)


def test_one_after_the_other() -> None:
    assert total(Linear(1, 2), Linear(3, 4), Linear()) == Linear(4, 6)


@pytest.mark.parametrize("numbers", [(-1.0, 1.0), (0.0, 0.0), (1.0, float("inf"))])
def test_devices_are_checked(numbers) -> None:
    with pytest.raises(ValueError, match="kernel_s must be finite"):
        Device(*numbers)
