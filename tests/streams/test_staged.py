"""Trainings on a simulated device whose messages travel over simulated gloo, through the host."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.collectives.background import Background
from lightning_dear.collectives.gloo import PairwiseCollectives, RankRows
from lightning_dear.collectives.launch_log import TAGS_OF_ONE_OPTIMIZER
from lightning_dear.collectives.staged import StagedCollectives
from lightning_dear.collectives.streams import Pairs
from lightning_dear.collectives.work import Waits, Work
from lightning_dear.compression import OkTopk
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.telemetry.clock import StreamClock
from tests.streams.communicators import Hang
from tests.streams.device import DEVICE, Cuda, Event, Stream, here, memory_of, this_thread
from tests.streams.ranks import Found, Rank, SimulatedStreams, on_simulated_cuda
from tests.streams.test_trainings import CODED, VARIANTS, check_weights, coded
from tests.streams.test_trainings import check as checked
from tests.streams.trainings import Training, reference, train

CUDA: Any = Cuda()

WAITS = {
    "loss_scale": (
        # Whether gradients have overflown on any rank, for which `unscale` waits.
        "collectives/staged.py:launch_max",
        # Torch's own, in `GradScaler.step`.
        "_local_scalar_dense at streams/trainings.py:step",
    ),
}
"""Where the training thread waits for the device in a step; nowhere else."""


def run(training: Training, size: int, *, is_late: bool = True, ranks_a_host: int = 1) -> Any:
    """Trains on all ranks; see `on_simulated_cuda`."""
    return on_simulated_cuda(
        lambda rank: train(training, rank, rank.staged()),
        size,
        is_late=is_late,
        ranks_a_host=ranks_a_host,
        has_threads=True,
    )


@cache
def of_hosts(training: Training, size: int, ranks_a_host: int = 1) -> list[Tensor]:
    """Weights after the same training on CPUs, over gloo."""
    found = on_simulated_cuda(
        lambda rank: train(training, rank, rank.host_collectives()),
        size,
        is_checked=False,
        ranks_a_host=ranks_a_host,
        has_threads=True,
    )
    return found.results[0]


check = partial(checked, always=())
"""On gloo the training thread never waits for what was sent a step before."""


@pytest.mark.parametrize(("variant", "is_late"), [*product(VARIANTS, (True, False))])
def test_bits_are_those_of_gloo(variant: str, is_late: bool) -> None:
    # By turns, threads being as late as they may be with two ranks, and as early with three.
    size = 2 if is_late else 3
    found = run(VARIANTS[variant], size, is_late=is_late)
    check(found, WAITS.get(variant, ()))
    expected = of_hosts(VARIANTS[variant], size)
    assert all(map(torch.equal, found.results[0], expected))
    if variant != "16_bits":
        # gloo sums 16 bits in fp32.
        check_weights(variant, found.results[0], reference(VARIANTS[variant], size))


@pytest.mark.parametrize("model", ["conv", "gpt"])
def test_models_with_buffers_and_tied_weights(model: str) -> None:
    training = replace(VARIANTS["two_optimizers"], model=model)
    found = run(training, 2)
    check(found)
    check_weights("two_optimizers", found.results[0], reference(training, 2))


@pytest.mark.parametrize("variant", VARIANTS)
def test_in_two_hops_bits_are_those_of_gloo(variant: str) -> None:
    found = run(VARIANTS[variant], 4, ranks_a_host=2, is_late=len(variant) % 2 == 0)
    check(found, WAITS.get(variant, ()))
    assert all(map(torch.equal, found.results[0], of_hosts(VARIANTS[variant], 4, 2)))


# --- what a launch costs, and what travels over the bus -------------------------------------------


def _noting(owner: Any, name: str, noted: list[str]) -> Any:
    function = getattr(owner, name)

    def noting(*args: Any) -> Any:
        if this_thread().is_training:
            noted.append(name)
        return function(*args)

    return noting


def test_a_launch_is_one_copy_on_the_device_and_three_calls() -> None:
    calls: list[str] = []

    def body(rank: Rank) -> None:
        collectives = rank.staged()
        buffer = torch.ones(8)
        rank.device.put(buffer)
        out = buffer[4 * rank.number :][:4]
        # The first launch makes the streams.
        collectives.launch_reduce_scatter(buffer, buffer[:0], out, 0).wait()
        rank.device.kernels.clear()
        noted: list[str] = []
        with ExitStack() as stack:
            for owner, name in ((Stream, "wait_stream"), (Cuda, "stream"), (Event, "record")):
                stack.enter_context(mock.patch.object(owner, name, _noting(owner, name, noted)))
            work = collectives.launch_reduce_scatter(buffer, buffer[:0], out, 0)
        calls.append(f"{sum(rank.device.kernels.values())} copies, {noted}")
        work.wait()

    on_simulated_cuda(body, 2, has_threads=True)
    assert calls == ["1 copies, ['wait_stream', 'stream', 'record']"] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 4])
def test_bytes_over_the_bus(dtype: torch.dtype, size: int) -> None:
    moved: list[tuple[int, int]] = []

    class Counting(SimulatedStreams):
        down = up = 0

        @override
        def copy_down(self, tensor: Tensor, host: Tensor) -> Callable[[], None]:
            self.down += tensor.nbytes
            return super().copy_down(tensor, host)

        @override
        def copy_up(self, pairs: Pairs) -> Callable[[], None]:
            self.up += sum(tensor.nbytes for tensor, _ in pairs)
            return super().copy_up(pairs)

    def body(rank: Rank) -> None:
        streams = Counting()
        collectives = rank.staged(streams=streams)
        gradients, parameters = torch.ones(16, dtype=dtype), torch.ones(16, dtype=dtype)
        shard = gradients.view(size, -1)[rank.number]
        mean = shard if dtype == torch.float32 else torch.empty_like(shard, dtype=torch.float32)
        rank.device.put(gradients, parameters, mean)
        collectives.launch_reduce_scatter(gradients, gradients[:0], mean, 0).wait()
        assert mean.tolist() == [size] * len(mean)
        collectives.launch_all_gather(parameters, 0).wait()
        moved.append((streams.down, streams.up))

    on_simulated_cuda(body, size, has_threads=True)
    n = 16 * dtype.itemsize
    shard_more = n // size if dtype == torch.bfloat16 else 0
    assert moved == [(n + n // size, n + shard_more)] * size


# --- faults that are planted, each of which is found ----------------------------------------------


class _CopiesEarly(SimulatedStreams):
    """Before the gradient is written: the copy does not wait for the stream that writes it."""

    @override
    def copy_down(self, tensor: Tensor, host: Tensor) -> Callable[[], None]:
        with self._cuda.stream(here().new_stream("a stream that waits for none")):
            return super().copy_down(tensor, host)


class _RecordsEarly(SimulatedStreams):
    """The event is recorded before the copies."""

    @override
    def copy_down(self, tensor: Tensor, host: Tensor) -> Callable[[], None]:
        copied = super().copy_down(tensor[:0], host[:0])
        super().copy_down(tensor, host)
        return copied


class _ReadsEarly(SimulatedStreams):
    """The stream that reads does not wait for the copy up."""

    @override
    def copy_up(self, pairs: Pairs) -> Callable[[], None]:
        super().copy_up(pairs)
        return lambda: None


class _FillsUnderCopies(SimulatedStreams):
    """A copy down does not wait for a copy up from the same memory."""

    @override
    def copy_up(self, pairs: Pairs) -> Callable[[], None]:
        follow = super().copy_up(pairs)

        def follow_alone() -> None:
            down, self._down = self._down, CUDA.Stream()
            follow()
            self._down = down

        return follow_alone


class _FreesEarly(SimulatedStreams):
    """What is copied down is a copy that nobody holds."""

    @override
    def copy_down(self, tensor: Tensor, host: Tensor) -> Callable[[], None]:
        return super().copy_down(tensor.clone(), host)


class _HoldsUp(SimulatedStreams):
    """The thread that copies up makes the stream that trains wait."""

    @override
    def copy_up(self, pairs: Pairs) -> Callable[[], None]:
        follow = super().copy_up(pairs)
        follow()
        return follow


class _SendsUnawaited(PairwiseCollectives):
    """Memory is filled again while it is sent: nobody waits for sends."""

    @override
    def _sends(self, lane: str, outgoing: RankRows, tag: int) -> Waits:
        super()._sends(lane, outgoing, tag)
        return []


class _Unguarded(StagedCollectives):
    """What is launched does not wait for a message that uses the bucket's memory."""

    @override
    def _stage(self, *args: Any) -> Work:
        self._under_way.clear()
        return super()._stage(*args)


def _found(streams: type[SimulatedStreams], variant: str = "dense") -> Found[list[Tensor]]:
    training = VARIANTS[variant]
    return on_simulated_cuda(
        lambda rank: train(training, rank, rank.staged(streams=streams())), 2, has_threads=True
    )


@pytest.mark.parametrize(
    ("streams", "what"),
    [
        (_CopiesEarly, r"copy_ on a stream .*:copy_down:.* reads .* on the compute stream writes"),
        (
            _RecordsEarly,
            r"isend on a message with tag 0 reads .* what copy_ .*:copy_down:.* writes",
        ),
        (_ReadsEarly, r" on the compute stream reads .* what copy_ .*:copy_up:.* writes"),
    ],
)
def test_what_is_in_no_order_is_found(streams: type[SimulatedStreams], what: str) -> None:
    assert re.search(what, str(_found(streams).races))


def test_what_is_free_under_a_copy_is_found() -> None:
    found = _found(_FreesEarly)
    assert re.search("copy_ on a stream .*, uses memory that is free", str(found.frees))


def test_a_thread_that_holds_up_the_training_is_found() -> None:
    assert "a wait of the compute stream" in str(_found(_HoldsUp).held_up)


def test_memory_that_is_filled_while_it_is_sent_is_found() -> None:
    def body(rank: Rank) -> list[Tensor]:
        plain = rank.host_collectives()
        groups = plain.reduce_group, plain.gather_group, plain.object_group
        host = _SendsUnawaited(*groups, plain.world, plain.calls)
        return train(VARIANTS["dense"], rank, StagedCollectives(host, SimulatedStreams()))

    found = on_simulated_cuda(body, 2, has_threads=True)
    assert "isend on a message with tag" in str(found.races)


# --- memory and threads ---------------------------------------------------------------------------


def _launch_twice(rank: Rank, kind: type[StagedCollectives]) -> None:
    """Gathers, and reduces in the same memory before anybody has waited."""
    collectives = rank.staged(kind)
    buffer = torch.ones(8)
    rank.device.put(buffer)
    gather = collectives.launch_all_gather(buffer, 0)
    gradients = torch.full((8,), 2.0)
    rank.device.put(gradients)
    out = gradients[4 * rank.number :][:4]
    collectives.launch_reduce_scatter(gradients, gradients[:0], out, 0).wait()
    gather.wait()
    assert buffer.tolist() == [1.0] * 8
    assert out.tolist() == [4.0] * 4


def _wait_elsewhere(rank: Rank, streams: SimulatedStreams) -> None:
    """Another stream waits for the gather, and then the first one reduces in the same memory."""
    collectives = rank.staged(streams=streams)
    buffer, gradients = torch.ones(8), torch.ones(8)
    rank.device.put(buffer, gradients)
    gather = collectives.launch_all_gather(buffer, 0)
    with CUDA.stream(CUDA.Stream()):
        gather.wait()
    out = gradients[4 * rank.number :][:4]
    collectives.launch_reduce_scatter(gradients, gradients[:0], out, 0).wait()


def test_a_copy_down_waits_for_a_copy_up_from_the_same_memory() -> None:
    body = _wait_elsewhere
    found = on_simulated_cuda(lambda rank: body(rank, SimulatedStreams()), 2, **THREADS)
    assert not found.races
    found = on_simulated_cuda(lambda rank: body(rank, _FillsUnderCopies()), 2, **THREADS)
    assert "copy_down" in str(found.races)


def test_a_launch_waits_for_a_message_in_the_same_memory() -> None:
    found = on_simulated_cuda(lambda rank: _launch_twice(rank, StagedCollectives), 2, **THREADS)
    assert not found.races
    assert not found.frees
    with pytest.raises(AssertionError):
        on_simulated_cuda(lambda rank: _launch_twice(rank, _Unguarded), 2, **THREADS)


THREADS: dict[str, Any] = {"has_threads": True}

A, B, C = (number * TAGS_OF_ONE_OPTIMIZER for number in range(3))


class _OneThread(StagedCollectives):
    """Has one thread for the arrivals of all optimizers."""

    @override
    def _stage(self, lane: str, tag: int, *args: Any) -> Work:
        for one in tuple(self._arrivals.values()):
            self._arrivals[lane, tag // TAGS_OF_ONE_OPTIMIZER] = one
        return super()._stage(lane, tag, *args)


def _in_two_orders(rank: Rank, kind: type[StagedCollectives]) -> None:
    """Launches messages of three optimizers in another order on each rank."""
    collectives, works = rank.staged(kind), {}
    for tag in (A, B, C) if rank.number == 0 else (B, C, A):
        buffer = torch.ones(8)
        rank.device.put(buffer)
        works[tag] = collectives.launch_all_gather(buffer, tag)
        # Rank 0 sends C once B is there, and rank 1 sends A once C is there.
        if tag == (B if rank.number == 0 else C):
            works[tag].wait()
    for work in works.values():
        work.wait()


def test_optimizers_may_be_in_another_order_on_each_rank() -> None:
    on_simulated_cuda(lambda rank: _in_two_orders(rank, StagedCollectives), 2, **THREADS)
    with pytest.raises(Hang):
        on_simulated_cuda(lambda rank: _in_two_orders(rank, _OneThread), 2, **THREADS)


def test_a_new_plan_lets_go_of_the_memory_of_the_old_one() -> None:
    kept: list[int] = []

    def body(rank: Rank) -> list[Tensor]:
        collectives = rank.staged()
        weights = train(VARIANTS["replan"], rank, collectives)
        wholes = [tag for tag, use, *_ in collectives._pinned if use == "whole"]
        assert sorted(wholes) == list(range(len(wholes)))
        kept.append(len(wholes))
        assert all(memory_of(one).is_pinned for one in collectives._pinned.values())
        return weights

    on_simulated_cuda(body, 2, has_threads=True)
    # One bucket for each tensor of the model, and none of the plan before, which has fewer.
    assert len(set(kept)) == 1


def test_a_bucket_that_was_waited_for_is_let_go_of() -> None:
    def body(rank: Rank) -> None:
        collectives, buffer = rank.staged(), torch.ones(8)
        rank.device.put(buffer)
        work = collectives.launch_all_gather(buffer, 0)
        assert collectives._under_way
        work.wait()
        assert not collectives._under_way

    on_simulated_cuda(body, 2, **THREADS)


def test_no_gather_is_expected_in_gradients_that_are_sent() -> None:
    def body(rank: Rank) -> None:
        collectives, buffer = rank.staged(), torch.ones(8)
        rank.device.put(buffer)
        out = buffer[4 * rank.number :][:4]
        work = collectives.launch_reduce_scatter(buffer, buffer[:0], out, 0)
        collectives.expect_all_gather(buffer, 0)
        assert not collectives._host._expected
        work.wait()
        collectives.expect_all_gather(buffer, 0)
        collectives.expect_reduce_scatter(buffer[:0], 0)
        assert set(collectives._host._expected) == {("all_gather", 0), ("reduce_scatter", 0)}

    on_simulated_cuda(body, 2, **THREADS)


@pytest.mark.parametrize("is_beside", [False, True])
def test_the_stream_waits_in_which_a_watched_message_is_waited_for(is_beside: bool) -> None:
    """Another thread waits for the arrival, as in `BucketRound.watch`."""

    def body(rank: Rank) -> None:
        collectives, buffer = rank.staged(), torch.ones(8)
        rank.device.put(buffer)
        with CUDA.stream(CUDA.Stream()) if is_beside else nullcontext():
            buffer.mul_(1)
            out = buffer[4 * rank.number :][:4]
            work = collectives.launch_reduce_scatter(buffer, buffer[:0], out, 0)
            work.await_in(Background("watching").submit)
            work.wait()
            out.mul_(2)
            CUDA.synchronize()

    on_simulated_cuda(body, 2, **THREADS).check()


def test_a_timeline_blocks_no_launch() -> None:
    waits: list[str] = []

    def body(rank: Rank) -> None:
        clock = StreamClock(DEVICE, CUDA, in_threads=True)
        arrive = clock.observe(
            "all_gather",
            lambda: waits.append(this_thread().name),
            lambda start, end: waits.append(f"{clock.seconds(end) >= clock.seconds(start)}"),
        )
        assert not waits
        arrive()
        clock.finish()

    on_simulated_cuda(body, 1, **THREADS)
    assert waits == ["the training thread", "the thread 'dear-timeline-all_gather'", "True"]


# --- codecs ---------------------------------------------------------------------------------------

FLAGS = "_local_scalar_dense at engine/bucket_round.py:_flags"
"""Where the training thread waits once a step: whether encoding has found inf."""

FIRST_HOP = "collectives/staged.py:wait_for"
"""Where it waits in two hops, for the copy of what a host sums, before it asks for inf."""

ON_CPUS = {
    # What codecs do on a CPU alone; `test_accelerator.py` runs what they do elsewhere.
    "fp16": ("compression/floats.py:encode",),
    "bf16": ("compression/floats.py:encode",),
    "dgc": ("compression/selectors.py:first_above", "compression/selectors.py:all_above"),
}


@pytest.mark.parametrize("name", CODED)
def test_encoded_bits_are_those_of_gloo(name: str) -> None:
    training = coded(name, "mlp")
    found = run(training, 2)
    check(found, (FLAGS, *ON_CPUS.get(name, ())))
    assert all(map(torch.equal, found.results[0], of_hosts(training, 2)))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one, marks=() if one in ("int8", "topk", "oktopk") else pytest.mark.slow)
        for one in CODED
    ],
)
def test_in_two_hops_encoded_bits_are_those_of_gloo(name: str) -> None:
    training = replace(coded(name, "mlp"), has_timeline=name == "int8")
    found = run(training, 4, ranks_a_host=2)
    # What votes is not summed within hosts.
    ends = (FIRST_HOP,) if any(FIRST_HOP in told for told in found.syncs) else ()
    check(found, (FLAGS, *ends, *ON_CPUS.get(name, ())))
    assert all(map(torch.equal, found.results[0], of_hosts(training, 4, 2)))


def test_dynamic_sparse_all_reduces_are_refused() -> None:
    options = ExchangeOptions("gradients", compressor=OkTopk(density=0.05))
    with pytest.raises(ValueError, match=r"OkTopk\(mode='static'\)"):
        run(Training(optimizer="plain", options=options), 2)
