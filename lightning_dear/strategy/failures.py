"""The first failure of a run, known to all ranks, and agreements that do not wait for ever.

A rank whose peer fails sees only a closed connection or a timeout. So the first rank that fails for
a reason of its own writes it on a board: the key-value store of the default process group. The
others read it there before they end. While a run lasts, `FailureWatch` looks at the board.

Nothing here raises because the store is gone, and nothing waits longer than it says.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from lightning_dear.collectives.store import default_store, new_store_client

log = logging.getLogger(__name__)

T = TypeVar("T")

EXCEPTION_GRACE_S = 10.0
"""Seconds within which all ranks must come for a checkpoint after a failure."""

REPORT_WAIT_S = 2.0
"""Seconds that a failing rank waits for another's report, or for others to read its own."""

STORE_WAIT_S = 2.0
"""Seconds after which the store counts as gone."""

WATCH_POLL_S = 0.5
"""Seconds between two looks at the board; each is one small message to the store."""

POLL_S = 0.05

_MAX_MESSAGE_CHARS = 2000

_CONSEQUENCE = re.compile(
    r"Connection (was likely )?(closed|reset|refused)|Broken pipe|[Ss]ocket (is )?closed"
    r"|Timed out waiting \d+ ?ms|[Ww]ait timeout|Socket Timeout|timeout caused pair closure"
    r"|monitoredBarrier|remote process exited|communicator was aborted|collective operation timeout"
    r"|NCCL operations have failed or timed out"
)
"""What gloo, NCCL and the store say on a rank whose peer has gone or does not come."""


@dataclass(frozen=True)
class Failure:
    """What a rank failed of, in one line."""

    rank: int
    message: str

    def __str__(self) -> str:
        return f"Rank {self.rank} failed first: {self.message}"


def describe(exception: BaseException) -> str:
    """The exception's type and text, as a traceback ends."""
    text = str(exception)[:_MAX_MESSAGE_CHARS]
    return f"{type(exception).__name__}: {text}" if text else type(exception).__name__


def is_consequence(exception: BaseException) -> bool:
    """Whether the root of the exception's chain only says that a peer is gone or late."""
    root = exception
    while (before := _earlier(root)) is not None:
        root = before
    return isinstance(root, RuntimeError) and bool(_CONSEQUENCE.search(str(root)))


def _earlier(exception: BaseException) -> BaseException | None:
    if exception.__cause__ is not None or exception.__suppress_context__:
        return exception.__cause__
    return exception.__context__


class FailureBoard:
    """What the ranks of one run know of its failure. Without other ranks all of it is a no-op.

    Args:
        attempt: Equal on all ranks and never used before in this store, so that a run after a
            failed one does not see the old failure.
        rank: This process's.
        world_size: Number of ranks.

    Attributes:
        has_failed: Whether this rank has failed in this run.
        seen: The first failure, once this rank knows it.
    """

    def __init__(self, attempt: str = "", rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.world_size = world_size
        self.has_failed = False
        self.seen: Failure | None = None
        self._attempt = attempt
        self._own: str | None = None
        self._suspected: str | None = None
        self._num_agreements = 0
        self._is_store_gone = False

    def handle(self, exception: BaseException) -> None:
        """Reports the failure of this rank, or says whose it was. Acts once a run.

        Blocks for at most about `2 * REPORT_WAIT_S`.
        """
        has_failed, self.has_failed = self.has_failed, True
        if has_failed or self.world_size == 1:
            return
        self.report(self.rank, exception)
        self.blame(exception)
        if self.rank == 0:
            # The store ends with this process; the others must have read it before.
            self._poll(self._all_others_know, REPORT_WAIT_S)

    def report(self, rank: int, exception: BaseException) -> None:
        """Writes the failure on the board; the first one whose cause lies on its own rank stays."""
        message = describe(exception)
        self._own = message

        def write(store: Any) -> bool:
            if not is_consequence(exception):
                store.compare_set(self._key("first"), "", f"{rank} {message}")
            self.read(store)
            store.set(self._key("failed", rank), message)
            # Last: who sees this reads the others at once.
            store.set(self._key("noticed"), str(rank))
            return True

        self._ask(write)

    def read(self, store: Any) -> bool:
        """Looks for the first failure in `store` and keeps it in `seen`; whether there is one.

        Keeps as well what a rank suspects that has noticed a silent end before this one, since
        that rank may take the store with it.
        """
        if store.check([self._key("suspicion")]):
            self._suspected = _in_one_line(store.get(self._key("suspicion")))
        if self.seen is None and store.check([self._key("first")]):
            rank, _, message = _in_one_line(store.get(self._key("first"))).partition(" ")
            self.seen = Failure(int(rank), message)
        return self.seen is not None

    def notice(self, store: Any) -> bool:
        """Whether any rank has failed; if so, leaves word that this rank's process lives."""
        if not store.check([self._key("noticed")]):
            return False
        self.read(store)
        store.set(self._key("alive", self.rank), "1")
        return True

    def blame(self, exception: BaseException) -> str | None:
        """Says which rank failed first, if `exception` is only a consequence of that.

        Waits at most `REPORT_WAIT_S` for that rank's report, logs the sentence as an error and adds
        it to the exception as a note (Python >= 3.11).

        Returns:
            The sentence; None where the cause is this rank's own.
        """
        if not is_consequence(exception):
            return None
        self._poll(self.read, REPORT_WAIT_S)
        sentence = str(self.seen) if self.seen is not None else self._suspicion()
        log.error("Rank %d ends because another rank failed. %s", self.rank, sentence)
        if hasattr(exception, "add_note"):
            exception.add_note(sentence)
        return sentence

    def agree(self, name: str, state: str = "", timeout_s: float = EXCEPTION_GRACE_S) -> None:
        """Returns once all ranks have called this with the same `state`; on all of them or on none.

        Args:
            name: What the ranks want to do together; stands in the error message after "Cannot".
            state: What must be equal on all ranks.
            timeout_s: Seconds to wait for the others.

        Raises:
            RuntimeError: Naming the ranks that came. No rank returns then.
        """
        if self.world_size == 1:
            return
        self._num_agreements += 1
        key = self._key("agree", self._num_agreements, name)
        verdict = self._ask(
            lambda store: self._verdict(store, key, state, timeout_s),
            timeout_s + REPORT_WAIT_S + STORE_WAIT_S,
        )
        if verdict == "yes":
            return
        reason = verdict or "the ranks' store is gone, and probably rank 0 with it"
        cause = self.seen or self._own
        raise RuntimeError(
            f"Cannot {name}: {reason}. Resume from the last checkpoint."
            + (f" ({cause})" if cause else "")
        )

    # --- the store -----------------------------------------------------------------------------

    def _key(self, *parts: object) -> str:
        return "/".join(["lightning_dear", self._attempt, *map(str, parts)])

    def _ask(self, question: Callable[[Any], T], timeout_s: float = STORE_WAIT_S) -> T | None:
        store = None if self.world_size == 1 or self._is_store_gone else default_store()
        if store is None:
            return None
        answer = _bounded(lambda: question(store), timeout_s)
        self._is_store_gone = answer is None
        return answer

    def _poll(self, question: Callable[[Any], bool], timeout_s: float) -> bool | None:
        return self._ask(
            lambda store: _wait_until(lambda: question(store), timeout_s), timeout_s + STORE_WAIT_S
        )

    def _without(self, store: Any, what: str) -> list[int]:
        return [r for r in range(self.world_size) if not store.check([self._key(what, r)])]

    def _all_others_know(self, store: Any) -> bool:
        return not set(self._without(store, "alive")) & set(self._without(store, "failed"))

    def _suspicion(self) -> str:
        found = self._ask(lambda store: [self._without(store, one) for one in ("failed", "alive")])
        if found is None:
            return self._suspected or (
                "No rank's report can be read, since rank 0, which keeps them, is gone: see what"
                " rank 0 printed last, and whether it was killed (out of memory)."
            )
        silent, mute = found
        if dead := [rank for rank in silent if rank in mute]:
            sentence = f"Ranks {dead} are gone without a report: were they killed (out of memory)?"
        elif silent:
            sentence = (
                f"Ranks {silent} did not come to a collective: see what they do or printed last."
            )
        else:
            sentence = "No rank has reported a cause of its own: see what each printed first."
        self._ask(lambda store: store.set(self._key("suspicion"), sentence) is None)
        return sentence

    def _verdict(self, store: Any, key: str, state: str, timeout_s: float) -> str:
        store.set(f"{key}/{self.rank}", state)
        marks = [f"{key}/{rank}" for rank in range(self.world_size)]
        decision = f"{key}/verdict"
        _wait_until(lambda: store.check([decision]) or store.check(marks), timeout_s)
        if store.check(marks):
            states = [store.get(mark).decode() for mark in marks]
            verdict = "yes" if len(set(states)) == 1 else f"ranks stand at {states}"
        else:
            came = [rank for rank, mark in enumerate(marks) if store.check([mark])]
            verdict = f"only ranks {came} of {self.world_size} came within {timeout_s:g} s"
        # Whoever decides first decides for all.
        decided = _in_one_line(store.compare_set(decision, "", verdict))
        store.set(f"{key}/heard/{self.rank}", "1")
        if self.rank == 0 and decided == "yes":
            # The store ends with rank 0; those who came must have heard before.
            heard = [f"{key}/heard/{rank}" for rank in range(self.world_size)]
            _wait_until(lambda: store.check(heard), REPORT_WAIT_S)
        return decided


def _in_one_line(said: bytes) -> str:
    """What another rank says, with escapes for what could look like a line of somebody else's."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in said.decode(errors="replace"))


def _wait_until(is_so: Callable[[], bool], timeout_s: float) -> bool:
    end = time.monotonic() + timeout_s
    while not (answer := is_so()) and time.monotonic() < end:
        time.sleep(POLL_S)
    return answer


def _bounded(call: Callable[[], T], timeout_s: float) -> T | None:
    """What `call` returns; None if it raises, or takes longer than `timeout_s`."""
    results: list[T] = []

    def run() -> None:
        with suppress(Exception):
            results.append(call())

    # A daemon: one that hangs in the store is left behind, and the process can still end.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return results[0] if results else None


# --- a thread that looks at the board, and ends a rank that never notices -----------------------


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
