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

REPORT_WAIT_S = 1.0
"""Seconds that a failing rank waits for another's report, or for others to read its own. Twice
`WATCH_POLL_S`, and not more: nobody is to end later than 2 s after a timeout."""

STORE_WAIT_S = 1.5
"""Seconds after which the store counts as gone."""

WATCH_POLL_S = 0.5
"""Seconds between two looks at the board; each is one small message to the store."""

RAISING_S = 1.5
"""More than the timeout: in it whoever waits in a collective raises by itself, and says more."""

ABORT_S = 2.0
"""After a failure was noticed; whoever has heard of it otherwise ends before, and says more."""

POLL_S = 0.05

_MAX_MESSAGE_CHARS = 2000
_QUOTED, _QUOTED_CHARS = 4, 300

_CONSEQUENCE = re.compile(
    r"Connection (was likely )?(closed|reset|refused)|Broken pipe|[Ss]ocket (is )?closed"
    r"|Timed out waiting \d+ ?ms|[Ww]ait timeout|Socket Timeout|timeout caused pair closure"
    r"|monitoredBarrier|remote process exited|communicator was aborted|collective operation timeout"
    r"|NCCL operations have failed or timed out"
)
"""What gloo, NCCL and the store say on a rank whose peer has gone or does not come."""

_CLOSED_BY = re.compile(r"connection closed by rank (\d+)")
"""What our own collectives make of it."""

_IS_LATE = re.compile(r"[Tt]imed out|[Tt]imeout")


@dataclass(frozen=True)
class Failure:
    """Holds what a rank failed of, in one line."""

    rank: int
    message: str

    def __str__(self) -> str:
        return f"Rank {self.rank} failed first: {self.message}"


def describe(exception: BaseException) -> str:
    """Returns the exception's type and text, as a traceback ends."""
    text = str(exception)[:_MAX_MESSAGE_CHARS]
    return f"{type(exception).__name__}: {text}" if text else type(exception).__name__


def is_consequence(exception: BaseException) -> bool:
    """Tells whether the root of the exception's chain only says that a peer is gone or late."""
    root = exception
    while (before := root.__cause__ if root.__suppress_context__ else root.__context__) is not None:
        root = before
    return isinstance(root, RuntimeError) and bool(_CONSEQUENCE.search(str(root)))


class FailureBoard:
    """Keeps what the ranks of one run know of its failure. With one rank it does nothing.

    Args:
        attempt: Equal on all ranks and never used before in this store, so that a run after a
            failed one does not see the old failure.
        rank: This process's.
        world_size: Number of ranks.

    Attributes:
        has_failed: Whether this rank has failed in this run.
        seen: The first failure, once this rank knows it.
        asked: A number for the wish to stop that this rank, or another, has heard of; 0: none.
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
        """Reports the failure of this rank, or says whose it was. Acts once a run.

        Blocks for at most about `2 * REPORT_WAIT_S`.
        """
        has_failed, self.has_failed = self.has_failed, True
        if has_failed or self.world_size == 1:
            return
        self.report(self.rank, exception)
        is_suspicion = self.blame(exception) is not None
        if self.rank == 0:
            # The store ends with this process; the others must have read it before.
            others = [rank for rank in range(self.world_size) if rank not in self._mute]
            know = [self._key("alive", rank) for rank in others]
            self._poll(lambda store: bool(store.check(know)), REPORT_WAIT_S)
            time.sleep(WATCH_POLL_S * is_suspicion)

    def report(self, rank: int, exception: BaseException) -> None:
        """Writes the failure on the board; the first one whose cause lies on its own rank stays."""
        message = self._own = describe(exception)

        def write(store: Any) -> bool:
            if not is_consequence(exception):
                store.compare_set(self._key("first"), "", f"{rank} {message}")
            self.read(store)
            self._post(store, f"failed/{rank}", message)
            self._post(store, f"alive/{rank}")
            # Last: who sees this reads the others at once.
            return self._post(store, "noticed") and self._post(store, "news")

        self._ask(write)

    def leave(self, how: str) -> None:
        """Says, for those that still expect something of it, why this rank has ended, unfailed.

        Args:
            how: Stands behind "Rank 1" where it is told.
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
        """Tells whether any rank has failed; if so, notes that this rank's process lives.

        Tells others, or learns from them, that a rank was asked to stop.
        """
        if self.asked:
            self._post(store, "stop", str(self.asked))
            self._post(store, "news")
        # The one thing that is asked for while nothing has happened.
        if not store.check([self._key("news")]):
            return False
        self.read(store)
        if not self.asked and store.check([self._key("stop")]):
            self.asked = int(store.get(self._key("stop")))
        if not store.check([self._key("noticed")]):
            return False
        return self._post(store, f"alive/{self.rank}")

    def blame(self, exception: BaseException) -> str | None:
        """Says which rank failed first, if `exception` is only a consequence of that.

        Waits at most `REPORT_WAIT_S` for that rank's report, logs the sentence as an error and adds
        it to the exception as a note (Python >= 3.11).

        Returns:
            The sentence; None where the cause is this rank's own.
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
        """The answer; None if the store is gone, or does not answer within `timeout_s`."""
        store = None if self.world_size == 1 or self._is_store_gone else default_store()
        if store is None:
            return None
        answers: list[T] = []

        def ask() -> None:
            with suppress(Exception):
                answers.append(question(store))

        # A daemon: one that hangs in the store is left behind, and the process can still end.
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
                "No rank's report can be read, since rank 0, which keeps them, is gone, stopped or"
                " out of reach: see what rank 0 printed last."
            )
        sentence = self._suspect(*found)
        self._ask(lambda store: self._post(store, "suspicion", sentence))
        return sentence

    def _suspect(self, failed: dict[int, str], left: dict[int, str], alive: dict[int, str]) -> str:
        """Tells who has ended, who is dead, who is cut off and who hangs, by what others report."""
        silent = [rank for rank in range(self.world_size) if rank not in failed]
        mute = self._mute = {rank for rank in silent if rank not in alive}
        reports = " ".join(failed.values())
        # A rank that was late for another closes its connections to all.
        closed = {int(rank) for rank in _CLOSED_BY.findall(reports)}
        dead = mute & closed if closed or _IS_LATE.search(reports) else mute
        # Whoever has ended may fail afterwards, of waiting for those that expect more of it.
        ended = [*left.values()] if len(left) < self.world_size else []
        if dead:
            return f"Ranks {[*dead]} are gone without a report: were they killed (out of memory)?"
        if ended:
            return " ".join(ended)
        if mute:
            return (
                f"Ranks {[*mute]} neither send nor answer: is their process stopped, or the link to"
                " them down?"
            )
        if silent:
            return f"Ranks {silent} did not come to a collective: see what they do or printed last."
        heads = [
            f"Rank {rank} says: {failed[rank][:_QUOTED_CHARS]}" for rank in [*failed][:_QUOTED]
        ]
        return " ".join(
            ["No rank has reported a cause of its own: see what each printed first.", *heads]
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


# --- a thread that looks at the board, and ends a rank that never notices -----------------------


_latest: FailureBoard | None = None


def first_failure() -> Failure | None:
    """Returns the first failure of this process's latest run, as far as this rank knows it."""
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
    all threads to stderr and ends the process with exit code 1. A board that cannot be read for as
    long is a failure too: rank 0, which keeps it, has ended, or nothing reaches it.

    Args:
        board: What to look at.
        timeout: Of a collective: the time that a rank has for noticing a failure by itself.

    Attributes:
        board: See above.
        on_failed: Called once, in a thread of its own, if this rank still trains `ABORT_S` after
            another one has reported a failure. May block.
        on_asked: Told, again and again and in a thread of its own, that a rank was asked to stop;
            takes `FailureBoard.asked`.
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
        """See `FailureBoard.handle`; from here on this rank ends by itself.

        Args:
            exception: Why it does.
            asked: Where all ranks end after the same step, who was asked to; nobody has failed.
        """
        self._is_over.set()
        if not asked:
            self.board.handle(exception)
            return
        self.board.has_failed = True
        self.board.leave(f"has ended, and not all others with it: {asked}.")

    def close(self) -> None:
        """Ends the watch: the run is over on this rank. Returns at once."""
        self._is_over.set()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles, which launchers make before a run, are of a run without ranks."""
        return FailureWatch, (FailureBoard(), timedelta(seconds=self._timeout_s))

    def _run(self) -> None:
        # A client has one lock, which the main thread may hold for as long as it waits for a key.
        client = new_store_client()
        abort = threading.Timer(ABORT_S, lambda: self._is_over.is_set() or self.on_failed())
        abort.daemon = True
        # A thread of its own: the store of a process that is stopped may take for ever to answer.
        threading.Thread(target=self._end_in_time, daemon=True, name="failure end").start()
        while client is not None and not self._is_over.wait(WATCH_POLL_S):
            try:
                # Goes on after that: the store may go before this rank fails.
                noticed = self.board.notice(client)
                if not self._has_noticed:
                    self._end_s = time.monotonic() + self._timeout_s + RAISING_S
                if noticed and not self._has_noticed:
                    abort.start()
                self._has_noticed = noticed
            except Exception:
                # An outage may pass; a connection that was lost in it does not come back.
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
            "Rank %d has not noticed within %g s that the run has failed, and is ended where the"
            " stacks below show it. %s",
            self.board.rank,
            self._timeout_s,
            self.board.seen or why,
        )
        dump_stacks()
        # An exception in this thread would not end the one that hangs.
        os._exit(1)
