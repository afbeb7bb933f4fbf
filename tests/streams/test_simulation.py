"""What the simulated device and NCCL find in small programs, and that they find nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from operator import methodcaller
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_dear import torch_modes
from lightning_dear.collectives.nccl import NativeCollectives
from lightning_dear.torch_modes import plain_mode
from tests.streams.communicators import Hang
from tests.streams.device import Cuda
from tests.streams.ranks import Found, Rank, on_simulated_cuda

SIZE = 12
CUDA: Any = Cuda()


class Program:
    """One rank's: a buffer of its number on the device, and what sends it."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.device = rank, rank.device
        self.buffer = torch.full((SIZE,), 1.0 + rank.number)
        self.device.put(self.buffer)
        self.own = self.buffer.view(rank.size, -1)[rank.number]
        self.collectives: NativeCollectives = rank.collectives()

    def reduce(self, buffer: Tensor | None = None) -> Any:
        """Starts a reduce-scatter."""
        buffer = self.buffer if buffer is None else buffer
        own = buffer.view(self.rank.size, -1)[self.rank.number]
        return self.collectives.launch_reduce_scatter(buffer, buffer[:0], own, 0)

    def gather(self) -> Any:
        """Starts an all-gather."""
        return self.collectives.launch_all_gather(self.buffer, 0)

    def branch(self) -> Any:
        """A stream that knows of nothing."""
        return CUDA.Stream()


def run(body: Callable[[Program], Any], size: int = 2, **options: Any) -> Found[Any]:
    """`body` on every rank."""
    return on_simulated_cuda(lambda rank: body(Program(rank)), size, **options)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("is_late", [True, False])
def test_a_correct_program_is_clean(size: int, is_late: bool) -> None:
    def body(program: Program) -> Tensor:
        program.reduce().wait()
        program.own.mul_(2.0)
        program.gather().wait()
        flags = torch.zeros(3, dtype=torch.uint8)
        flags[program.rank.number] = 1
        program.collectives.launch_max(flags).wait()
        told = torch.full((2,), float(program.rank.number))
        program.collectives.launch_broadcast(told, 0).wait()
        rows = torch.full((size, 2), program.rank.number)
        incoming = torch.empty_like(rows)
        program.collectives.launch_all_to_all(rows, incoming, 0).wait()
        sizes = [*range(size)]
        parts, of_others = torch.full((sum(sizes),), 5), torch.empty(program.rank.number * size)
        of_others = of_others.to(parts)
        program.collectives.calls.all_to_all_single(
            of_others,
            parts,
            [program.rank.number] * size,
            sizes,
            group=program.collectives.gather_group,
            async_op=False,
        )
        assert of_others.eq(5).all()
        whole = torch.ones(SIZE)
        program.collectives.launch_all_reduce(whole, 0).wait()
        assert program.collectives.all_gather_object(program.rank.number) == [*range(size)]
        return torch.cat([program.buffer, flags, told, incoming[:, 0], whole])

    found = run(body, size, is_late=is_late)
    found.check()
    total = float(sum(range(1, size + 1)))
    flags = [1.0] * size + [0.0] * (3 - size)
    expected = [2 * total] * SIZE + flags + [0.0, 0.0, *range(size)] + [float(size)] * SIZE
    for result in found.results:
        assert result.tolist() == expected


def test_who_does_not_wait_for_a_gather_is_found() -> None:
    def body(program: Program) -> Tensor:
        program.gather()
        return program.buffer + 1

    found = run(body)
    assert "add on the compute stream reads at" in str(found.races)
    assert "all-gather 0 of 'gather'" in str(found.races)
    assert found.results[0].isnan().any()


def test_who_does_not_wait_for_a_reduction_is_found() -> None:
    def body(program: Program) -> Tensor:
        program.reduce()
        return program.own * 2

    found = run(body)
    assert "mul on the compute stream reads" in str(found.races)
    assert found.results[0].tolist() != [6.0] * (SIZE // 2)


def test_a_copy_after_the_launch_is_found() -> None:
    def body(program: Program) -> None:
        work = program.reduce()
        program.buffer[0] = 7.0
        work.wait()

    # copy_ before torch 2.15, fill_ from then on.
    assert re.search("(copy|fill)_ on the compute stream writes", str(run(body).races))


def test_a_launch_from_a_stream_that_is_not_behind_is_found() -> None:
    def body(program: Program) -> Tensor:
        with CUDA.stream(program.branch()):
            work = program.gather()
        work.wait()
        return program.buffer + 1

    found = run(body)
    assert "all-gather 0 of 'gather' on the stream of 'gather' reads" in str(found.races)
    # Nobody else can know: the numbers are right here.
    assert not found.results[0].isnan().any()


@pytest.mark.parametrize("how", ["wait_stream", "event"])
def test_a_launch_from_a_stream_that_is_behind_is_clean(how: str) -> None:
    def body(program: Program) -> None:
        branch = program.branch()
        if how == "event":
            event = CUDA.Event()
            event.record()
            branch.wait_event(event)
        else:
            branch.wait_stream(CUDA.current_stream())
        with CUDA.stream(branch):
            work = program.gather()
        work.wait()
        program.buffer.mul_(2.0)

    run(body).check()


def test_a_wait_on_another_stream_does_not_count() -> None:
    def body(program: Program) -> None:
        work = program.gather()
        with CUDA.stream(program.branch()):
            work.wait()
        program.buffer.mul_(2.0)

    assert run(body).races


def test_memory_that_is_free_while_it_is_sent_is_found() -> None:
    def body(program: Program, keeps: bool) -> None:
        sent = program.buffer.clone()
        work = program.reduce(sent)
        # Torch drops what it keeps, whichever stream waits.
        with CUDA.stream(program.branch()):
            work.wait()
        kept = sent if keeps else None
        del sent, work
        if kept is not None:
            CUDA.synchronize()

    found = run(lambda program: body(program, keeps=False))
    assert "uses memory that is free at" in str(found.frees)
    assert len(found.frees) == 1
    run(lambda program: body(program, keeps=True)).check()


def test_memory_that_torch_keeps_is_not_free() -> None:
    def body(program: Program) -> None:
        work = program.reduce(program.buffer.clone())
        work.wait()
        program.reduce(program.buffer.clone())

    run(body).check()


def test_another_order_on_another_rank_is_found() -> None:
    def body(program: Program) -> None:
        launches = program.reduce, program.gather
        works = [launch() for launch in launches[:: 1 - 2 * program.rank.number]]
        for work in works:
            work.wait()

    found = run(body)
    told = "rank 0 reduce-scatter of 12 torch.float32 in 'reduce', rank 1 all-gather of 6"
    assert told in str(found.other_order)


def test_with_one_stream_for_all_that_order_hangs() -> None:
    def body(program: Program) -> None:
        launches = program.reduce, program.gather
        for launch in launches[:: 1 - 2 * program.rank.number]:
            launch()

    with pytest.raises(Hang, match="rank 0 waits for others in reduce-scatter 0"):
        run(body, is_late=False)


def test_who_waits_for_a_rank_that_has_ended_hangs() -> None:
    def body(program: Program) -> None:
        if program.rank.number == 0:
            program.gather().wait()

    with pytest.raises(Hang, match="rank 1 waits for nothing: it has ended"):
        run(body)


def test_what_a_rank_raises_is_raised() -> None:
    def body(program: Program) -> None:
        if program.rank.number == 1:
            raise ValueError("mine")
        program.gather().wait()

    with pytest.raises(ValueError, match="mine"):
        run(body)


def test_what_does_not_fit_together_is_refused() -> None:
    def body(program: Program) -> None:
        size = SIZE + 2 * program.rank.number
        program.collectives.launch_all_gather(torch.zeros(size), 0).wait()

    with pytest.raises(RuntimeError, match="does not fit together"):
        run(body)


@pytest.mark.parametrize(
    "read",
    [
        float,
        bool,
        *map(methodcaller, ("tolist", "item", "nonzero", "numpy", "cpu")),
        lambda numbers: numbers[numbers > 0],
        lambda numbers: numbers.index_put_((numbers > 0,), numbers[:1] * 2),
    ],
)
@pytest.mark.parametrize("is_plain", [False, True])
def test_a_wait_of_the_host_is_found_with_its_line(
    read: Callable[[Tensor], Any], is_plain: bool
) -> None:
    def body(program: Program) -> None:
        numbers = program.buffer[:1] * 2
        with plain_mode("cpu") if is_plain else nullcontext():
            read(numbers)

    (told,) = run(body).syncs
    assert "streams/test_simulation.py:body:" in told or "<lambda>" in told


def test_a_number_that_is_put_where_a_mask_is_true_makes_nobody_wait() -> None:
    def body(program: Program) -> None:
        program.buffer[program.buffer > 1] = 0.0
        program.buffer[torch.tensor([1, 2])] = program.buffer[:2] * 2

    found = run(body)
    assert not found.syncs
    assert found.results == [None, None]


def test_what_is_on_the_host_makes_nobody_wait() -> None:
    def body(program: Program) -> None:
        torch.ones(3).sum().item()
        torch.ones(3).tolist()
        program.buffer.mul_(torch.tensor(2.0))

    found = run(body)
    assert not found.syncs
    assert found.devices[0].kernels == {"mul_": 1}


def test_what_the_host_has_waited_for_is_over() -> None:
    def body(program: Program) -> None:
        program.buffer.add_(1.0)
        assert CUDA.current_stream() is CUDA.default_stream()
        program.buffer.sum().item()
        with CUDA.stream(program.branch()):
            program.buffer.add_(1.0)
        CUDA.synchronize()

    found = run(body)
    found.check()
    assert len(found.syncs) == 2


def test_parts_of_one_memory_are_told_apart() -> None:
    def body(program: Program) -> None:
        left, right = program.buffer.chunk(2)
        branch = program.branch()
        branch.wait_stream(CUDA.current_stream())
        left.add_(1.0)
        with CUDA.stream(branch):
            right.add_(1.0)
        CUDA.synchronize()

    run(body).check()


def test_nothing_of_a_memory_is_in_order_with_all_of_it() -> None:
    def body(program: Program) -> None:
        branch = program.branch()
        branch.wait_stream(CUDA.current_stream())
        program.buffer.add_(1.0)
        with CUDA.stream(branch):
            program.buffer[5:5].add_(1.0)
        CUDA.synchronize()

    run(body).check()


def test_what_batch_norm_writes_is_seen() -> None:
    def body(program: Program) -> None:
        branch, inputs = program.branch(), torch.randn(2, SIZE)
        mean, variance = torch.zeros(SIZE), torch.ones(SIZE)
        program.device.put(inputs, mean, variance)
        branch.wait_stream(CUDA.current_stream())
        F.batch_norm(inputs, mean, variance, training=True)
        with CUDA.stream(branch):
            variance.sum()
        CUDA.synchronize()

    assert "native_batch_norm on the compute stream writes" in str(run(body).races)


def test_what_a_run_has_changed_is_put_back() -> None:
    def body(program: Program) -> None:
        raise ValueError("mine")

    before = torch.get_num_threads(), torch_modes.HOST_DEVICES, Tensor.tolist, Tensor.cpu
    with pytest.raises(ValueError, match="mine"):
        run(body)
    after = torch.get_num_threads(), torch_modes.HOST_DEVICES, Tensor.tolist, Tensor.cpu
    assert after == before
