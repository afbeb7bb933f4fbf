"""A thread that learns of other ranks' failures, and ends a rank that never notices one."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

from lightning_dear.collectives.store import new_store_client
from lightning_dear.strategy.failures.board import Failure, FailureBoard

log = logging.getLogger(__name__)

WATCH_POLL_S = 0.5
"""Seconds between two looks at the board; each is one small message to the store."""

_latest: FailureBoard | None = None


def first_failure() -> Failure | None:
    """The first failure of this process's latest run, as far as this rank knows it already."""
    return None if _latest is None else _latest.seen


def dump_stacks() -> None:
    """Writes the Python stacks of all threads to stderr, so that a hang shows where it stands."""
    # A notebook's or a test's stderr may be no file.
    if sys.__stderr__ is not None:
        with suppress(OSError, ValueError):
            faulthandler.dump_traceback(sys.__stderr__, all_threads=True)


class FailureWatch:
    """Looks at a board until this rank's run is over.

    A rank that hangs outside any collective never sees that the others have ended. Where nobody
    ends it from outside, this thread does: `timeout` after the first report it writes the stacks of
    all threads to stderr and ends the process with exit code 1.

    Args:
        board: What to look at.
        timeout: Of a collective: the time that a rank has for noticing a failure by itself.
    """

    def __init__(self, board: FailureBoard, timeout: timedelta) -> None:
        self.board = board
        self._timeout_s = timeout.total_seconds()
        self._is_over = threading.Event()
        if board.world_size > 1:
            global _latest
            _latest = board
            threading.Thread(target=self._run, daemon=True, name="failure watch").start()

    def handle(self, exception: BaseException) -> None:
        """See `FailureBoard.handle`; from here on this rank ends by itself."""
        self._is_over.set()
        self.board.handle(exception)

    def close(self) -> None:
        """The run is over on this rank. Returns at once."""
        self._is_over.set()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles, which launchers make before a run, are of a run without ranks."""
        return FailureWatch, (FailureBoard(), timedelta(seconds=self._timeout_s))

    def _run(self) -> None:
        # A client has one lock, which the main thread may hold for as long as it waits for a key.
        client = new_store_client()
        if client is None:
            return
        try:
            while not self.board.notice(client):
                if self._is_over.wait(WATCH_POLL_S):
                    return
        except Exception:
            # The store is gone: whatever this rank waits for fails too, and says more.
            if self.board.seen is None:
                return
        end = time.monotonic() + self._timeout_s
        while (left_s := end - time.monotonic()) > 0:
            # The store may go before this rank fails, and with it what it could read then.
            with suppress(Exception):
                self.board.read(client)
            if self._is_over.wait(min(left_s, WATCH_POLL_S)):
                return
        self._end()

    def _end(self) -> None:
        log.critical(
            "Rank %d has not noticed within %g s that the run has failed, and is ended where the"
            " stacks below show it. %s",
            self.board.rank,
            self._timeout_s,
            self.board.seen or "Other ranks have waited for it in vain.",
        )
        dump_stacks()
        # An exception in this thread would not end the one that hangs.
        os._exit(1)
