"""A thread that runs calls one after the other, so that others can ask whether one has ended."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from lightning_dear.collectives.work import T

_Todo = queue.SimpleQueue[Callable[[], None] | None]


class Background:
    """Runs what it is given in order, in a thread that starts with the first and ends with this.

    torch's works cannot be asked whether their data has arrived; a thread that waits for one can.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._todo: _Todo = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Runs `call` in the thread, when it has run what was given before. Does not block.

        Returns:
            Has `call`'s result, or raises what it has raised.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._thread is None:
                # A daemon, as what it waits for may never come, and must not keep the process
                # alive. It holds the queue and not `self`, so that `self` can go, which ends it.
                self._todo = queue.SimpleQueue()
                self._thread = threading.Thread(
                    target=_run, args=(self._todo,), name=self._name, daemon=True
                )
                self._thread.start()
                weakref.finalize(self, self._todo.put, None)
            self._todo.put(partial(_run_one, call, future))
        return future

    def finish(self) -> None:
        """Blocks until all that was given before has ended, and ends the thread.

        What another thread gives meanwhile is run by a new one.
        """
        with self._lock:
            thread, self._thread = self._thread, None
            # Within the lock: behind the end nothing would be run.
            self._todo.put(None)
        if thread is not None:
            thread.join()


def _run(todo: _Todo) -> None:
    # No local name outlives a turn: it would keep process groups, and their threads, alive.
    while _run_next(todo.get()):
        pass


def _run_next(run: Callable[[], None] | None) -> bool:
    if run is not None:
        run()
    return run is not None


def _run_one(call: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(call())
    # Whatever it is, whoever waits gets it; raised here it would end this thread, and be lost.
    except BaseException as error:
        future.set_exception(error)
