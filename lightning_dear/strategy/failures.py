"""Tells all ranks which rank failed first and why, and lets ranks agree with a time limit.

A rank whose peer has failed sees only a closed connection or a timeout. So a rank that fails for a
reason of its own writes the reason on a board: keys in the store of the default process group. The
other ranks read it there before they end. `FailureWatch` reads the board during a run.

If the store is gone, only `agree` raises. All other functions go on without an answer. Every wait
has the time limit that is documented with it.
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
"""Seconds that a rank waits in `FailureBoard.agree` for the others, unless told otherwise."""

REPORT_WAIT_S = 1.0
"""Seconds that a failing rank waits for other ranks' reports, or until they have read its own.
Twice `WATCH_POLL_S`, and not more: every rank must end within 2 s after a timeout."""

STORE_WAIT_S = 1.5
"""Seconds after which a store that does not answer counts as gone."""

WATCH_POLL_S = 0.5
"""Seconds between two reads of the board. Each read sends one small message to the store."""

RAISING_S = 1.5
"""Seconds, plus the timeout of collectives, from reading of a failure until this rank is ended.
Until then a rank that waits in a collective raises by itself, and its error says more."""

ABORT_S = 2.0
"""Seconds from reading a failure on the board until this rank's collectives are aborted. Until then
a rank that notices the failure by itself ends, and its error says more."""

POLL_S = 0.05

_MAX_MESSAGE_CHARS = 2000
_QUOTED, _QUOTED_CHARS = 4, 300

_CONSEQUENCE = re.compile(
    r"Connection (was likely )?(closed|reset|refused)|Broken pipe|[Ss]ocket (is )?closed"
    r"|Timed out waiting \d+ ?ms|[Ww]ait timeout|Socket Timeout|timeout caused pair closure"
    r"|monitoredBarrier|remote process exited|communicator was aborted|collective operation timeout"
    r"|NCCL operations have failed or timed out"
)
"""Matches errors of gloo, NCCL and the store on a rank whose peer is gone or came too late."""

_CLOSED_BY = re.compile(r"connection closed by rank (\d+)")
"""Matches errors of this package's collectives that name the peer that is gone."""

_IS_LATE = re.compile(r"[Tt]imed out|[Tt]imeout")


@dataclass(frozen=True)
class Failure:
    """Names the rank that failed first, with its error in one line."""

    rank: int
    message: str

    def __str__(self) -> str:
        return f"Rank {self.rank} failed first: {self.message}"


def describe(exception: BaseException) -> str:
    """Returns the exception's type, and its message, of which at most 2000 characters."""
    text = str(exception)[:_MAX_MESSAGE_CHARS]
    return f"{type(exception).__name__}: {text}" if text else type(exception).__name__


def is_consequence(exception: BaseException) -> bool:
    """Tells whether the exception was caused only by a peer that is gone or timed out.

    The first exception of its chain decides, by its class (RuntimeError) and its message.
    """
    root = exception
    while (before := root.__cause__ if root.__suppress_context__ else root.__context__) is not None:
        root = before
    return isinstance(root, RuntimeError) and bool(_CONSEQUENCE.search(str(root)))


class FailureBoard:
    """Shares failures and wishes to stop between the ranks of one run, through keys in the store.

    With one rank nothing is written, read or waited for.

    Args:
        attempt: Name of the run, equal on all ranks and not used before in this store. It keeps a
            run from reading the failure of an earlier run.
        rank: Rank of this process.
        world_size: Number of ranks.

    Attributes:
        has_failed: Whether an exception has ended this rank's run, also that of a wish to stop.
        seen: The first failure with a cause of its own. None means that this rank knows of none.
        asked: The largest wish to stop that this rank knows, as in `StopRequest`. 0 means no wish.
    """

    def __init__(self, attempt: str = "", rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.world_size = world_size
        self.has_failed = False
        self.seen: Failure | None = None
        self.asked = 0
        self._attempt = attempt
        self._own: str | None = None
        self._suspected: str | None = None
        self._num_agreements = 0
        self._is_store_gone = False
        self._mute: set[int] = set()

    def handle(self, exception: BaseException) -> None:
        """Reports this rank's failure and, if another rank caused it, logs which one.

        Blocks for at most about `2 * REPORT_WAIT_S`, and longer if the store does not answer. Only
        the first call in a run acts.
        """
        has_failed, self.has_failed = self.has_failed, True
        if has_failed or self.world_size == 1:
            return
        self.report(self.rank, exception)
        is_suspicion = self.blame(exception) is not None
        if self.rank == 0:
            # The store ends with this process, so the other ranks must have read it before.
            others = [rank for rank in range(self.world_size) if rank not in self._mute]
            know = [self._key("alive", rank) for rank in others]
            self._poll(lambda store: bool(store.check(know)), REPORT_WAIT_S)
            time.sleep(WATCH_POLL_S * is_suspicion)

    def report(self, rank: int, exception: BaseException) -> None:
        """Writes a failure on the board, which keeps the first one not caused by another rank."""
        message = self._own = describe(exception)

        def write(store: Any) -> bool:
            if not is_consequence(exception):
                store.compare_set(self._key("first"), "", f"{rank} {message}")
            self.read(store)
            self._post(store, f"failed/{rank}", message)
            self._post(store, f"alive/{rank}")
            # Written last, because a rank that finds these keys reads the others at once.
            return self._post(store, "noticed") and self._post(store, "news")

        self._ask(write)

    def leave(self, how: str) -> None:
        """Writes on the board why this rank has ended without failing, for ranks that still wait.

        Args:
            how: Rest of a sentence that begins with "Rank" and the number of this rank.
        """
        sentence = f"Rank {self.rank} {how}"

        def write(store: Any) -> bool:
            store.compare_set(self._key("suspicion"), "", sentence)
            self._post(store, f"left/{self.rank}", sentence)
            return self._post(store, f"alive/{self.rank}") and self._post(store, "news")

        self._ask(write)

    def _post(self, store: Any, key: str, text: str = "1") -> bool:
        store.set(self._key(key), text)
        return True

    def read(self, store: Any) -> bool:
        """Reads the first failure from `store` into `seen`. Returns whether there is one.

        Also keeps the sentence that another rank has written about a rank that ended without a
        report: it could not be read later, should the store end with rank 0.
        """
        if store.check([self._key("suspicion")]):
            self._suspected = _in_one_line(store.get(self._key("suspicion")))
        if self.seen is None and store.check([self._key("first")]):
            rank, _, message = _in_one_line(store.get(self._key("first"))).partition(" ")
            self.seen = Failure(int(rank), message)
        return self.seen is not None

    def notice(self, store: Any) -> bool:
        """Reads the board. Returns whether a rank has reported a failure.

        If one has, also writes on the board that this rank lives. If this rank has a wish to stop,
        writes it on the board. Otherwise reads another rank's wish into `asked`.
        """
        if self.asked:
            self._post(store, "stop", str(self.asked))
            self._post(store, "news")
        # As long as nothing has happened, this is the only message to the store.
        if not store.check([self._key("news")]):
            return False
        self.read(store)
        if not self.asked and store.check([self._key("stop")]):
            self.asked = int(store.get(self._key("stop")))
        if not store.check([self._key("noticed")]):
            return False
        return self._post(store, f"alive/{self.rank}")

    def blame(self, exception: BaseException) -> str | None:
        """Finds out which rank failed first, if `exception` is only a consequence of that.

        Waits at most `REPORT_WAIT_S` for that rank's report; without one the sentence is a guess.
        Logs the sentence as an error, and adds it to the exception as a note (Python >= 3.11).

        Returns:
            The sentence. None means that `exception` is no consequence of another rank's failure.
        """
        if not is_consequence(exception):
            return None
        everybody = [self._key("alive", rank) for rank in range(self.world_size)]
        self._poll(lambda store: self.read(store) or store.check(everybody), REPORT_WAIT_S)
        sentence = str(self.seen) if self.seen is not None else self._suspicion()
        log.error("Rank %d ends because another rank failed. %s", self.rank, sentence)
        if hasattr(exception, "add_note"):
            exception.add_note(sentence)
        return sentence

    def agree(self, name: str, state: str = "", timeout_s: float = EXCEPTION_GRACE_S) -> None:
        """Returns once all ranks have called it with the same `state`. Collective. Blocks.

        Either all ranks return or all raise, unless the store ends meanwhile: then a rank raises.

        Args:
            name: What the ranks want to do, a verb phrase that follows "Cannot" in the error.
            state: Text that must be equal on all ranks.
            timeout_s: Seconds to wait for the other ranks.

        Raises:
            RuntimeError: If ranks do not come in time or differ in `state`, or the store is gone.
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
        """Returns `question(store)`, or None if it is slow or raises: the store counts as gone."""
        store = None if self.world_size == 1 or self._is_store_gone else default_store()
        if store is None:
            return None
        answers: list[T] = []

        def ask() -> None:
            with suppress(Exception):
                answers.append(question(store))

        # A daemon thread, so that the process can end although the thread hangs in the store.
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(timeout_s)
        answer = answers[0] if answers else None
        self._is_store_gone = answer is None
        return answer

    def _poll(self, question: Callable[[Any], bool], timeout_s: float) -> bool | None:
        return self._ask(
            lambda store: _wait_until(lambda: question(store), timeout_s), timeout_s + STORE_WAIT_S
        )

    def _said(self, store: Any, what: str) -> dict[int, str]:
        keys = {rank: self._key(what, rank) for rank in range(self.world_size)}
        return {
            rank: _in_one_line(store.get(key)) for rank, key in keys.items() if store.check([key])
        }

    def _suspicion(self) -> str:
        kinds = "failed", "left", "alive"
        found = self._ask(lambda store: [self._said(store, kind) for kind in kinds])
        if found is None:
            return self._suspected or (
                "No rank's report can be read: rank 0, which keeps them, is gone, stopped or out of"
                " reach. See what rank 0 printed last."
            )
        sentence = self._suspect(*found)
        self._ask(lambda store: self._post(store, "suspicion", sentence))
        return sentence

    def _suspect(self, failed: dict[int, str], left: dict[int, str], alive: dict[int, str]) -> str:
        """Guesses from the ranks' reports which rank is gone, has ended, is cut off or hangs.

        Args:
            failed: Rank -> its failure, of ranks that have reported one.
            left: Rank -> why it has ended without failing.
            alive: Rank -> "1", of ranks that lived when they noticed that a rank had failed.
        """
        silent = [rank for rank in range(self.world_size) if rank not in failed]
        mute = self._mute = {rank for rank in silent if rank not in alive}
        reports = " ".join(failed.values())
        # A process that dies closes its connections, and one that is stopped does not. A rank that
        # times out closes them, too, but it reports a failure.
        closed = {int(rank) for rank in _CLOSED_BY.findall(reports)}
        dead = mute & closed if closed or _IS_LATE.search(reports) else mute
        # If all ranks have ended, the failure came afterwards, and `left` does not explain it.
        ended = [*left.values()] if len(left) < self.world_size else []
        if dead:
            return (
                f"Ranks {[*dead]} are gone without a report. See what they printed last, and in"
                " dmesg whether they were killed (out of memory)."
            )
        if ended:
            return " ".join(ended)
        if mute:
            return (
                f"Ranks {[*mute]} neither send nor answer. See whether their process is stopped, or"
                " the link to them is down."
            )
        if silent:
            return f"Ranks {silent} did not come to a collective. See what they do or printed last."
        heads = [
            f"Rank {rank} says: {failed[rank][:_QUOTED_CHARS]}" for rank in [*failed][:_QUOTED]
        ]
        return " ".join(
            ["No rank has reported a cause of its own. See what each printed first.", *heads]
        )

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
        # The first verdict in the store is the verdict of all ranks.
        decided = _in_one_line(store.compare_set(decision, "", verdict))
        store.set(f"{key}/heard/{self.rank}", "1")
        if self.rank == 0 and decided == "yes":
            # The store ends with rank 0, so the other ranks must have read the verdict before.
            heard = [f"{key}/heard/{rank}" for rank in range(self.world_size)]
            _wait_until(lambda: store.check(heard), REPORT_WAIT_S)
        return decided


def _in_one_line(said: bytes) -> str:
    """Decodes another rank's text. Line breaks are escaped, or it could pass for other output."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in said.decode(errors="replace"))


def _wait_until(is_so: Callable[[], bool], timeout_s: float) -> bool:
    end = time.monotonic() + timeout_s
    while not (answer := is_so()) and time.monotonic() < end:
        time.sleep(POLL_S)
    return answer


# --- a thread that reads the board, and ends a rank that never notices a failure ----------------


_latest: FailureBoard | None = None


def first_failure() -> Failure | None:
    """Returns the first failure of this process's latest run. None if it has read of none."""
    return None if _latest is None else _latest.seen


def dump_stacks() -> None:
    """Writes the Python stacks of all threads to stderr, so that a hang shows where it stands."""
    # In a notebook or a test stderr may be no file, and the dump fails.
    if sys.__stderr__ is not None:
        with suppress(OSError, ValueError):
            faulthandler.dump_traceback(sys.__stderr__, all_threads=True)


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
        on_asked: Called in the reading thread with `FailureBoard.asked`, after each read of the
            board, as long as a rank wishes to stop.
    """

    def __init__(self, board: FailureBoard, timeout: timedelta) -> None:
        self.board = board
        self.on_asked: Callable[[int], object] = int
        self.on_failed: Callable[[], object] = int
        self._timeout_s = timeout.total_seconds()
        self._end_s = time.monotonic() + self._timeout_s + RAISING_S
        self._has_noticed = False
        self._is_over = threading.Event()
        if board.world_size > 1:
            global _latest
            _latest = board
            threading.Thread(target=self._run, daemon=True, name="failure watch").start()

    def handle(self, exception: BaseException, asked: str = "") -> None:
        """Ends the watch and reports `exception`, with which this rank's run ends.

        Blocks as long as `FailureBoard.handle`.

        Args:
            exception: The exception.
            asked: Sentence about the wish to stop, if all ranks end because of it. Empty means that
                `exception` is a failure.
        """
        self._is_over.set()
        if not asked:
            self.board.handle(exception)
            return
        self.board.has_failed = True
        self.board.leave(f"has ended, and not all others with it: {asked}.")

    def close(self) -> None:
        """Ends the watch, since the run is over on this rank. Does not block."""
        self._is_over.set()

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes copies and unpickled objects, needed only before a run, watch nothing."""
        return FailureWatch, (FailureBoard(), timedelta(seconds=self._timeout_s))

    def _run(self) -> None:
        # A client of its own: a store client has one lock, and the main thread may hold it as long
        # as it waits for a key.
        client = new_store_client()
        abort = threading.Timer(ABORT_S, lambda: self._is_over.is_set() or self.on_failed())
        abort.daemon = True
        # Another thread, because a read may hang if the process that has the store is stopped.
        threading.Thread(target=self._end_in_time, daemon=True, name="failure end").start()
        while client is not None and not self._is_over.wait(WATCH_POLL_S):
            try:
                # Also read after a failure: its cause may be written later than the failure itself.
                noticed = self.board.notice(client)
                if not self._has_noticed:
                    self._end_s = time.monotonic() + self._timeout_s + RAISING_S
                if noticed and not self._has_noticed:
                    abort.start()
                self._has_noticed = noticed
            except Exception:
                # A network outage may pass, but the lost connection must be made anew.
                with suppress(Exception):
                    client = new_store_client(STORE_WAIT_S)
            if self.board.asked:
                self.on_asked(self.board.asked)
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
        # An exception in this thread would not end the thread that hangs.
        os._exit(1)
