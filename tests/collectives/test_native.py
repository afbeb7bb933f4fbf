"""What NCCL's collectives need besides torch's calls, told without a device."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dear.collectives import factory
from lightning_dear.collectives.nccl import NativeCollectives
from lightning_dear.collectives.work import Work
from lightning_dear.strategy.failures import is_consequence


class _Calls:
    """torch.distributed, whose works let go of all memory as soon as any stream waits for them."""

    def __init__(self, world: Any = None) -> None:
        self.group = SimpleNamespace(WORLD=world)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self

    def wait(self) -> None:
        return


def _recorded(lane: str, name: str, arrive: Callable[[], None]) -> Callable[[], None]:
    """As a timeline records on a device: a stream beside waits at once."""
    arrive()
    return arrive


LAUNCHES: dict[str, Callable[[NativeCollectives, Tensor, Tensor], Work]] = {
    "reduce-scatter": lambda one, a, b: one.launch_reduce_scatter(a, b[:0], b[4:], 0),
    "all-to-all": lambda one, a, b: one.launch_all_to_all(a, b, 0),
    "all-gather": lambda one, a, b: one.launch_all_gather(a, 0),
    "all-reduce": lambda one, a, b: one.launch_all_reduce(a, 0),
    "flags": lambda one, a, b: one.launch_any(a),
    "broadcast": lambda one, a, b: one.launch_broadcast(a, 0),
}


@pytest.mark.parametrize("what", LAUNCHES)
def test_what_a_collective_is_given_is_held_until_it_is_waited_for(what: str) -> None:
    collectives = NativeCollectives(None, None, None, 0, 2, _Calls())
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


@pytest.mark.parametrize("can_abort", [True, False])
def test_after_an_abort_whatever_is_launched_or_waited_for_raises(can_abort: bool) -> None:
    log: list[str] = []
    # Another backend's have no such calls; objects go through gloo's.
    both: list[Any] = [_Group(log) if can_abort else object() for _ in range(2)]
    collectives = NativeCollectives(*both, None, 0, 2, _Calls(both[0]))
    work = collectives.launch_all_reduce(torch.zeros(2), 0)
    collectives.check()
    collectives.abort()
    assert log == (["start", *["abort"] * 3, "end"] if can_abort else [])
    for late in (work.wait, lambda: collectives.launch_any(torch.zeros(2)), collectives.check):
        with pytest.raises(RuntimeError, match="another rank has failed") as raised:
            late()
        assert is_consequence(raised.value)


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
    made = {"new_group": new_group, "ProcessGroupNCCL": nccl, "is_nccl_available": lambda: True}
    monkeypatch.setattr(factory, "dist", SimpleNamespace(**made))
    options: Any = factory._new_group(timeout, "nccl")
    assert options.is_high_priority_stream
    assert options._timeout == (timeout or usual)
    assert factory._new_group(timeout, "gloo") is None
