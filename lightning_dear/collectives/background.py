"""A thread that runs calls one after another, so that a caller can ask whether a call has ended."""

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from lightning_dear.collectives.work import T

_Todo = queue.SimpleQueue[Callable[[], bool]]
"""Calls that return whether the thread goes on."""


class Background:
    """Runs submitted calls in order, in one thread.

    The thread starts with the first call. It ends after the calls that are queued when `finish` is
    called or this object is deleted. It serves as a way to ask whether data has arrived, which
    torch's works do not tell: the thread waits for a work, and the future of that call says whether
    the wait has ended.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._todo: _Todo = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queues `call`; the thread runs it after all calls queued before. Does not block.

        Returns:
            A future that gets the result of `call`, or the exception that `call` raises.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._thread is None:
                # A daemon thread, because the call may wait for data that never comes, and must not
                # keep the process alive. The thread refers to the queue and not to `self`, so that
                # `self` can be deleted. The finalizer then queues `bool`, which returns False, so
                # that the thread ends.
                self._todo = queue.SimpleQueue()
                self._thread = threading.Thread(
                    target=_run, args=(self._todo,), name=self._name, daemon=True
                )
                self._thread.start()
                weakref.finalize(self, self._todo.put, bool)
            self._todo.put(partial(_run_one, call, future))
        return future

    def finish(self) -> None:
        """Blocks until all calls queued before have ended, and ends the thread, if there is one.

        A call that is submitted later, also while this blocks, is run by a new thread.
        """
        with self._lock:
            thread, self._thread = self._thread, None
            # Under the lock, because a call queued after this end would never run.
            self._todo.put(bool)
        if thread is not None:
            thread.join()


def _run(todo: _Todo) -> None:
    # No local variable holds the last call while the thread waits for the next one: it would keep
    # process groups, and their threads, alive.
    while todo.get()():
        pass


def _run_one(call: Callable[[], Any], future: Future[Any]) -> bool:
    try:
        future.set_result(call())
    # Every exception, so that the future's reader gets it. Raised here, it would end this thread
    # and be lost.
    except BaseException as error:
        future.set_exception(error)
    return True
