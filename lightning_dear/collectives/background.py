"""A thread that waits for collectives, so that others can ask whether one has arrived."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Watched:
    """Something that a watcher waits for, and how it ended.

    Args:
        arrive: Blocks until it is there.
        record: Called, in the watcher's thread, as soon as it is there or has failed.
    """

    def __init__(self, arrive: Callable[[], None], record: Callable[[], None]) -> None:
        self._arrive, self._record = arrive, record
        self._ended = threading.Event()
        self._failure: BaseException | None = None

    def watch(self) -> None:
        """Waits; for the watcher's thread."""
        try:
            try:
                self._arrive()
            finally:
                self._record()
        # Whatever it is, whoever waits gets it; raised here it would end this thread, and be lost.
        except BaseException as error:
            self._failure = error
        self._ended.set()

    @property
    def has_ended(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Blocks until it is there; raises what waiting for it raised."""
        self._ended.wait()
        if self._failure is not None:
            raise self._failure


class Watcher:
    """Waits for what it is given, one after the other, in a thread that starts with the first.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._todo: queue.SimpleQueue[Watched | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def watch(
        self, arrive: Callable[[], None], record: Callable[[], None] = lambda: None
    ) -> Watched:
        """Waits for `arrive` in the thread; see `Watched`. Does not block."""
        watched = Watched(arrive, record)
        if self._thread is None:
            # A daemon, since what it waits for may never come, and must not keep the process alive.
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._todo.put(watched)
        return watched

    def _run(self) -> None:
        while (watched := self._todo.get()) is not None:
            watched.watch()

    def finish(self) -> None:
        """Blocks until all has ended, and ends the thread."""
        if self._thread is not None:
            self._todo.put(None)
            self._thread.join()
            self._thread = None
