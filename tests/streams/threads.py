"""Threads beside the one that trains, on a simulated device: of all threads, one runs at a time.

What a thread hands to another one, it hands on what it knows to be over, too: where a call is
queued for a thread, and where its result is read.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from lightning_dear.collectives.background import Background
from tests.streams.checker import Checker
from tests.streams.communicators import Hang, Network
from tests.streams.device import Clock, Thread, join, this_thread, use


class _Result(Future[Any]):
    """Of a call in another thread.

    Args:
        network: Whose turns are taken.
        name: Of the other thread.
    """

    def __init__(self, network: Network, name: str) -> None:
        super().__init__()
        self._network, self._name = network, name
        self.clock: Clock = {}

    def wait_for(self) -> None:
        """Blocks until it is there."""
        thread, is_done = this_thread(), super().done
        self._network.turns.wait_until(thread.turn, f"the thread '{self._name}'", is_done)
        join(thread.clock, self.clock)

    def done(self) -> bool:
        """See Future."""
        if is_done := super().done():
            join(this_thread().clock, self.clock)
        return is_done

    def result(self, timeout: float | None = None) -> Any:
        """See Future."""
        self.wait_for()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> Any:
        """See Future."""
        self.wait_for()
        return super().exception(timeout)


class _Worker:
    """The thread of a `Background`: runs what is in its queue, in order.

    Args:
        network: Whose turns it takes.
        name: For people.
        is_checked: Whether its kernels are looked at.
    """

    def __init__(self, network: Network, name: str, *, is_checked: bool) -> None:
        self.network, self.name, self._is_checked = network, name, is_checked
        self.queue: deque[tuple[Callable[[], Any], _Result, Clock]] = deque()
        self.is_running = False
        self._device = this_thread().device
        rank = self._device.rank
        self._turn = network.turns.add(f"'{name}' of rank {rank}", "calls", lambda: self.has_calls)
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def has_calls(self) -> bool:
        """Whether a call has not ended."""
        return bool(self.queue) or self.is_running

    def _run(self) -> None:
        use(thread := Thread(self._device, f"the thread '{self.name}'", self._turn))
        turns = self.network.turns
        turns.begin(self._turn)
        with ExitStack() as stack:
            if self._is_checked:
                stack.enter_context(Checker(self._device, has_host=True))
            try:
                while True:
                    turns.wait_until(self._turn, "calls", lambda: bool(self.queue))
                    self._run_one(thread, *self.queue.popleft())
            # Also once all ranks have ended.
            except Hang:
                turns.end(self._turn)

    def _run_one(
        self, thread: Thread, call: Callable[[], Any], result: _Result, clock: Clock
    ) -> None:
        self.is_running = True
        join(thread.clock, clock)
        try:
            value = call()
        except BaseException as error:
            result.clock = dict(thread.clock)
            result.set_exception(error)
        else:
            result.clock = dict(thread.clock)
            result.set_result(value)
        self.is_running = False


@contextmanager
def threads_simulated(network: Network, *, is_checked: bool, is_eager: bool) -> Iterator[None]:
    """The engine's threads take turns with the ranks, in all of the block.

    Args:
        network: Whose turns.
        is_checked: Whether their kernels are looked at.
        is_eager: Whether a thread runs as soon as it has a call, and not when it is waited for.
    """
    workers: dict[Background, _Worker] = {}

    def submit(self: Background, call: Callable[[], Any]) -> _Result:
        if self not in workers:
            workers[self] = _Worker(network, self._name, is_checked=is_checked)
        worker, thread = workers[self], this_thread()
        result = _Result(network, worker.name)
        worker.queue.append((call, result, dict(thread.clock)))
        if is_eager:
            network.turns.offer(thread.turn)
        return result

    def finish(self: Background) -> None:
        if (worker := workers.get(self)) is not None:
            turn, what = this_thread().turn, f"the end of the thread '{worker.name}'"
            network.turns.wait_until(turn, what, lambda: not worker.has_calls)

    def wait(results: Sequence[_Result], timeout: float) -> Any:
        for one in results:
            one.wait_for()
        return SimpleNamespace(done=results)

    with (
        mock.patch.multiple(Background, submit=submit, finish=finish),
        mock.patch("lightning_dear.collectives.staged.wait", wait),
    ):
        yield
