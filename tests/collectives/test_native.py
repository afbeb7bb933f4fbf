"""What NCCL's collectives need besides torch's calls, told without a device."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from sys import getrefcount
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dear.collectives import factory
from lightning_dear.collectives import work as work_module
from lightning_dear.collectives.nccl import NativeCollectives
from lightning_dear.collectives.two_hops import NativeTwoHopCollectives
from lightning_dear.collectives.work import Work
from lightning_dear.collectives.world import World
from lightning_dear.strategy.failures import is_consequence
from tests.distributed.strict import Strict, strict


class _Calls:
    """torch.distributed, whose works let go of all memory as soon as any stream waits for them."""

    def __init__(self, world: Any) -> None:
        self.group = SimpleNamespace(WORLD=world)

    def __getattr__(self, name: str) -> Any:
        # Whoever does not ask for a work gets none.
        return lambda async_op=False, **given: self if async_op else None

    def _coalescing_manager(self, **given: Any) -> Any:
        return nullcontext(self)

    def wait(self) -> None:
        return


def _calls(world: Any = None) -> Any:
    return Strict(_Calls(world))


def _recorded(lane: str, name: str, arrive: Callable[[], None]) -> Callable[[], None]:
    """As a timeline records on a device: a stream beside waits at once."""
    arrive()
    return arrive


def _all_for_rank_1(numel: int, collectives: NativeCollectives) -> list[int]:
    return [numel if rank == 1 else 0 for rank in range(collectives.world.size)]


LAUNCHES: dict[str, Callable[[NativeCollectives, Tensor, Tensor], Work]] = {
    "reduce-scatter": lambda one, a, b: one.launch_reduce_scatter(
        a, b[: one.scratch_numel(8)], b[-8 // one.world.size :], 0
    ),
    "all-to-all": lambda one, a, b: one.launch_all_to_all(a, b, 0),
    "parts": lambda one, a, b: one.launch_parts(
        (a, _all_for_rank_1(8, one)), (b[:5], _all_for_rank_1(5, one)), 0
    ),
    "all-gather": lambda one, a, b: one.launch_all_gather(a, 0),
    "all-reduce": lambda one, a, b: one.launch_all_reduce(a, 0),
    "flags": lambda one, a, b: one.launch_max(a),
    "broadcast": lambda one, a, b: one.launch_broadcast(a, 0),
    "sums of a host": lambda one, a, b: one.launch_sums_of_host(
        a, b[:4], lambda sums: sums, b[4:].view(2, 2), 0
    )[0],
    "gather of a host": lambda one, a, b: one.launch_gather_of_host(a, 0),
}
NEED_HOSTS = ("sums of a host", "gather of a host")


ON_HOSTS = World(0, 4, (0, 0, 2, 2))
IN_TWO_HOPS = NativeTwoHopCollectives(*[None] * 7, ON_HOSTS, _calls())


@pytest.mark.parametrize(
    ("what", "hops"),
    [(what, hops) for what in LAUNCHES for hops in (1, 2) if hops == 2 or what not in NEED_HOSTS],
)
def test_what_a_collective_is_given_is_held_until_it_is_waited_for(what: str, hops: int) -> None:
    one_hop = NativeCollectives(None, None, None, World(0, 2), _calls())
    collectives = one_hop if hops == 1 else IN_TWO_HOPS
    collectives.observer = _recorded
    sent, received = torch.zeros(8), torch.zeros(8)
    memory = weakref.ref(sent.untyped_storage())
    work = LAUNCHES[what](collectives, sent, received)
    del sent
    assert memory() is not None
    work.wait()
    assert memory() is None


class _Group:
    """A process group and its backend; notes what is done to it."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def _get_backend(self, device: torch.device) -> _Group:
        return self

    def _group_start(self) -> None:
        self._log.append("start")

    def _group_end(self) -> None:
        self._log.append("end")

    def abort(self) -> None:
        self._log.append("abort")
        # As one does that torch has ended.
        raise RuntimeError("aborted before")


def test_two_hops_let_go_of_all_groups_when_training_ends() -> None:
    group = object()
    number = getrefcount(group)
    collectives = NativeTwoHopCollectives(*[group] * 7, ON_HOSTS, _calls())
    assert getrefcount(group) == number + 7
    collectives.forget_groups()
    assert getrefcount(group) == number


@pytest.mark.parametrize("can_abort", [True, False])
@pytest.mark.parametrize("hops", [1, 2])
def test_after_an_abort_whatever_is_launched_or_waited_for_raises(
    can_abort: bool, hops: int
) -> None:
    log: list[str] = []
    # Another backend's have no such calls; objects go through gloo's.
    groups: list[Any] = [_Group(log) if can_abort else object() for _ in range(4 * hops - 2)]
    both, world = groups[-2:], groups[0]
    collectives: NativeCollectives
    if hops == 1:
        collectives = NativeCollectives(*both, None, World(0, 2), _calls(world))
    else:
        collectives = NativeTwoHopCollectives(*groups[:4], *both, None, ON_HOSTS, _calls(world))
    work = collectives.launch_all_reduce(torch.zeros(2), 0)
    collectives.check()
    collectives.abort()
    aborts = ["abort"] * (4 * hops - 1)
    assert log == (["start", *aborts, "end"] if can_abort else [])
    for late in (work.wait, lambda: collectives.launch_max(torch.zeros(2)), collectives.check):
        with pytest.raises(RuntimeError, match="communicator was aborted") as raised:
            late()
        assert is_consequence(raised.value)


def test_who_has_failed_aborts_before_its_groups_are_destroyed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    group: Any = _Group(log)
    collectives = NativeCollectives(group, group, None, World(0, 2), _calls(group))
    collectives.discard()
    factory.abort_after_failure()
    assert not log, "its device is idle"
    monkeypatch.setattr(work_module, "LEAVE_S", 0.1)
    monkeypatch.setattr(type(collectives.streams), "synchronize", lambda self: time.sleep(1))
    collectives.was_discarded = False
    factory.abort_after_failure()
    assert not log, "it has not failed"
    collectives.discard()
    factory.abort_after_failure()
    assert log == ["start", "abort", "abort", "abort", "end"]


@pytest.mark.parametrize("timeout", [None, timedelta(seconds=40)])
def test_kernels_of_nccl_go_before_others(
    timeout: timedelta | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = timedelta(minutes=10)

    class Options:
        def __init__(self, is_high_priority_stream: bool) -> None:
            self.is_high_priority_stream, self._timeout = is_high_priority_stream, usual

    def new_group(timeout: timedelta | None, pg_options: Any) -> Any:
        return pg_options

    nccl = SimpleNamespace(Options=Options)
    made = {"ProcessGroupNCCL": nccl, "is_nccl_available": lambda: True}
    made["new_group"] = strict("new_group", new_group)
    monkeypatch.setattr(factory, "dist", SimpleNamespace(**made))
    options: Any = factory.dist.new_group(**factory._arguments_of(timeout, "nccl"))
    assert options.is_high_priority_stream
    assert options._timeout == (timeout or usual)
    assert factory.dist.new_group(**factory._arguments_of(timeout, "gloo")) is None
