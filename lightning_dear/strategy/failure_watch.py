"""`FailureWatch`: a thread that reads a `FailureBoard`, and ends a rank that never notices."""

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from lightning_dear import private_names
from lightning_dear.collectives.store import new_store_client
from lightning_dear.collectives.work import Collectives
from lightning_dear.strategy.failures import STORE_WAIT_S, WATCH_POLL_S, FailureBoard, Line, is_late

log = logging.getLogger(__name__)

RAISING_S = 1.5
"""Seconds, plus the timeout of collectives, from reading of a failure until this rank is ended.
Until then a rank that waits in a collective raises by itself, and its error says more."""

ABORT_S = 2.0
"""Seconds from reading a failure on the board until this rank's collectives are aborted. Until then
a rank that notices the failure by itself ends, and its error says more."""

_latest: FailureBoard | None = None


def first_failure() -> Line | None:
    """Returns the first failure of this process's latest run. None if it has read of none."""
    return None if _latest is None else _latest.seen


def dump_stacks() -> None:
    """Writes the Python stacks of all threads to stderr, so that a hang shows where it stands."""
    # In a notebook or a test stderr may be no file, and the dump fails.
    if sys.__stderr__ is not None:
        with suppress(OSError, ValueError):
            faulthandler.dump_traceback(sys.__stderr__, all_threads=True)


def dump_flight_record(rank: int) -> None:
    """Writes torch's record of this rank's last collectives into a file, and logs its name.

    Does nothing if this version of torch has no record. The name of the file begins with
    `TORCH_FR_DUMP_TEMP_FILE` of the environment, as where torch writes it by itself on NCCL, and
    ends with the rank. `torchfrtrace` compares the files of all ranks.
    """
    default = str(Path(gettempdir()) / "nccl_trace_rank_")
    path = Path(f"{os.environ.get('TORCH_FR_DUMP_TEMP_FILE', default)}{rank}")
    with suppress(Exception):
        # Stack traces would take seconds.
        path.write_bytes(private_names.FLIGHT_RECORD.imported()(includeStackTraces=False))
        log.error("Rank %d has written its last collectives to %s.", rank, path)


class FailureWatch:
    """Reads a board in a thread, twice a second, until this rank's run is over.

    A rank that hangs outside of collectives never notices that other ranks have failed. So a second
    thread ends this process if the run still goes on `timeout` + `RAISING_S` after a failure was
    read: it writes the stacks of all threads to stderr, and exits with code 1. It does the same if
    the board cannot be read for as long, since then rank 0, which keeps it, is gone or cut off.

    Args:
        board: The board of this run.
        timeout: Timeout of collectives. A rank in a collective notices a failure within this time.

    Attributes:
        board: Same as the argument.
        on_failed: Called once, in a thread of its own, if this rank's run still goes on `ABORT_S`
            after it has read that a rank has failed. May block.
        on_consequence: To be called when this rank ends since another one has failed: later waits
            for messages give up at once.
        on_asked: Called in the reading thread with `FailureBoard.asked`, after each read of the
            board, as long as a rank wishes to stop. If it raises, the error is logged, and that was
            the last call.
    """

    def __init__(self, board: FailureBoard, timeout: timedelta) -> None:
        self.board = board
        self.on_asked: Callable[[int], object] = int
        self.on_failed: Callable[[], object] = int
        self.on_consequence: Callable[[], object] = int
        self._on_closed: Callable[[], object] = int
        self._timeout_s = timeout.total_seconds()
        self._end_s = time.monotonic() + self._timeout_s + RAISING_S
        self._has_noticed = False
        self._is_over = threading.Event()
        if board.world_size > 1:
            global _latest
            _latest = board
            threading.Thread(target=self._run, daemon=True, name="failure watch").start()

    def follow(self, collectives: Collectives) -> None:
        """Aborts `collectives` once another rank has failed, and reports what they have launched.

        To be called when a run's collectives have been made.
        """
        self.on_failed = collectives.abort
        self.on_consequence = partial(setattr, collectives, "has_given_up", True)
        self._on_closed = collectives.abort_if_stuck
        self.board.launches = collectives.log.last

    def handle(self, exception: BaseException, asked: str = "") -> None:
        """Ends the watch and reports `exception`, with which this rank's run ends.

        Blocks as long as `FailureBoard.handle`. Only the first call in a run reports, and writes
        torch's record after a timeout.

        Args:
            exception: The exception.
            asked: Sentence about the wish to stop, if all ranks end because of it. Empty means that
                `exception` is a failure.
        """
        self._is_over.set()
        if not asked:
            is_first = not self.board.has_failed
            self.board.handle(exception)
            if is_first and self.board.world_size > 1 and is_late(exception):
                dump_flight_record(self.board.rank)
            return
        self.board.has_failed = True
        self.board.leave(f"has ended, and not all others with it: {asked}.")

    def agree_on_change(self) -> None:
        """Waits until all ranks drop their plans since an optimizer's parameters have changed.

        Raises:
            RuntimeError: If they do not come.
        """
        self.board.agree(
            "follow a change of the optimizers, which all ranks must make before the same step",
            # Half the timeout, so that ranks that wait in a collective can still be told why.
            timeout_s=self._timeout_s / 2,
        )

    def meet(self, where: str) -> None:
        """After a failure: waits some seconds for all ranks. Logs a warning if they do not come."""
        try:
            self.board.agree(f"meet at {where}")
        except RuntimeError as error:
            log.warning("Not all ranks are there after the failure. %s", error)

    @contextmanager
    def completing(self) -> Iterator[None]:
        """A context in which parameters are completed to be saved: says what to do after a failure.

        Raises:
            RuntimeError: If the block does.
        """
        try:
            yield
        except RuntimeError as error:
            if not self.board.has_failed:
                raise
            raise RuntimeError(
                f"The parameters of the last step did not all arrive ({error}), so that they cannot"
                f" be saved. Resume from the last checkpoint. ({self.board.seen or 'See above.'})"
            ) from error

    def close(self) -> None:
        """Ends the watch, since the run is over on this rank, and nothing more is to be saved.

        After an exception it also calls `Collectives.abort_if_stuck`, which may block a few
        seconds.
        """
        self._is_over.set()
        if self.board.has_failed:
            self._on_closed()

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes copies and unpickled objects, needed only before a run, watch nothing."""
        return FailureWatch, (FailureBoard(), timedelta(seconds=self._timeout_s))

    def _run(self) -> None:
        # A client of its own: a store client has one lock, and the main thread may hold it as long
        # as it waits for a key.
        client: Any = None
        # At first the store may have all ranks to answer.
        connect_s = 10.0
        abort = threading.Timer(ABORT_S, lambda: self._is_over.is_set() or self.on_failed())
        abort.daemon = True
        # Another thread, because a read may hang if the process that has the store is stopped.
        threading.Thread(target=self._end_in_time, daemon=True, name="failure end").start()
        while not self._is_over.wait(WATCH_POLL_S):
            try:
                if client is None and (client := new_store_client(connect_s)) is None:
                    break
                # Also read after a failure: its cause may be written later than the failure itself.
                noticed = self.board.notice(client)
                if not self._has_noticed:
                    self._end_s = time.monotonic() + self._timeout_s + RAISING_S
                if noticed and not self._has_noticed:
                    abort.start()
                self._has_noticed = noticed
            except Exception:
                # A network outage may pass, but the lost connection must be made anew.
                client, connect_s = None, STORE_WAIT_S
            try:
                if self.board.asked:
                    self.on_asked(self.board.asked)
            except Exception:
                # This thread must go on, or `_end_in_time` would end a healthy run.
                log.exception("Rank %d cannot be told to stop. End it by hand.", self.board.rank)
                self.on_asked = int
        self._is_over.set()

    def _end_in_time(self) -> None:
        while (left_s := self._end_s - time.monotonic()) > 0:
            if self._is_over.wait(left_s):
                return
        why = "Other ranks wait for it in vain." if self._has_noticed else "Rank 0 does not answer."
        self._end(why)

    def _end(self, why: str) -> None:
        log.critical(
            "Rank %d has not noticed within %g s that the run has failed, and is ended. The stacks"
            " below show where it hangs. %s",
            self.board.rank,
            self._timeout_s,
            self.board.seen or why,
        )
        dump_stacks()
        # In a thread, since this process must end even if torch does not answer.
        dump = threading.Thread(target=dump_flight_record, args=(self.board.rank,), daemon=True)
        dump.start()
        dump.join(ABORT_S)
        # An exception in this thread would not end the thread that hangs.
        os._exit(1)
