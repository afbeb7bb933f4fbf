"""Tells all ranks which rank failed first and why, and lets ranks agree with a time limit.

A rank whose peer has failed sees only a closed connection or a timeout. So a rank that fails for a
reason of its own writes the reason on a board: a key in the store of the default process group, to
which every rank appends lines. The other ranks read it there before they end. `FailureWatch` reads
the board during a run.

If the store is gone, `agree` raises, and so do `read` and `notice`, which `FailureWatch` catches.
All other functions go on without an answer. Every wait has the time limit that is documented with
it.
"""

import json
import logging
import re
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar
from zlib import compress, decompress

from lightning_dear.collectives.launch_log import LastLaunches, divergence
from lightning_dear.collectives.store import default_store

log = logging.getLogger(__name__)

T = TypeVar("T")

EXCEPTION_GRACE_S = 10.0
"""Seconds that a rank waits in `FailureBoard.agree` for the others, unless told otherwise."""

END_WAIT_S = 10.0
"""Seconds that a rank waits in `FailureBoard.end_with` for the others. torchrun kills ranks 30 s
after SIGTERM, and they are still to save."""

REPORT_WAIT_S = 1.0
"""Seconds that a failing rank waits for other ranks' reports, or until they have read its own.
Twice `WATCH_POLL_S`, and not more: every rank must end within 2 s after a timeout. On a link with
delay some round trips are added."""

STORE_WAIT_S = 1.5
"""Seconds, plus some round trips, after which a store that does not answer counts as gone."""

WATCH_POLL_S = 0.5
"""Seconds between two reads of the board. Each read sends one small message to the store."""

_NUM_TRIPS = 6
"""Every wait at the store lasts this many round trips longer. While a rank waits for another rank's
line, that rank's poll, its reading, its line, and this rank's own reading need up to five."""

POLL_S = 0.05

_MAX_MESSAGE_CHARS = 2000
_QUOTED, _QUOTED_CHARS = 4, 300

_CONSEQUENCE = re.compile(
    r"Connection (was likely )?(closed|reset|refused|timed out)|Broken pipe|[Ss]ocket (is )?closed"
    r"|No route to host|Network is unreachable"
    r"|Timed out waiting \d+ ?ms|[Ww]ait timeout|Socket Timeout|timeout caused pair closure"
    r"|monitoredBarrier|remote process exited|communicator was aborted|collective operation timeout"
    r"|NCCL operations have failed or timed out|its message is not waited for"
)
"""Matches errors of gloo, NCCL and the store on a rank whose peer is gone or came too late."""

_CLOSED_BY = re.compile(r"connection closed by rank (\d+)")
"""Matches errors of this package's collectives that name the peer that is gone."""

_keeping = threading.Lock()

_UNREADABLE = (
    "No rank's report can be read: rank 0, which keeps them, is gone, stopped or out of reach. See"
    " what rank 0 printed last."
)

_NO_CAUSE = "No rank has reported a cause of its own. See what each printed first."

_IS_LATE = re.compile(r"[Tt]imed out|[Tt]imeout")


def describe(exception: BaseException) -> str:
    """Returns the exception's type, and its message, of which at most 2000 characters."""
    text = str(exception)[:_MAX_MESSAGE_CHARS]
    return f"{type(exception).__name__}: {text}" if text else type(exception).__name__


def is_consequence(exception: BaseException) -> bool:
    """Tells whether the exception was caused only by a peer that is gone or timed out.

    The first exception of its chain decides, by its class (RuntimeError) and its message. A chain
    that comes back to an earlier exception, as `raise e from e` makes it, ends in front of that.
    """
    # By id, since exceptions may be equal, and some have no hash.
    root, seen = exception, {id(exception)}
    while (before := root.__cause__ if root.__suppress_context__ else root.__context__) is not None:
        if id(before) in seen:
            break
        seen.add(id(before))
        root = before
    return isinstance(root, RuntimeError) and bool(_CONSEQUENCE.search(str(root)))


def is_late(exception: BaseException) -> bool:
    """Tells whether the exception was caused only by a peer that has not answered in time."""
    return is_consequence(exception) and bool(_IS_LATE.search(str(exception)))


_ENDS = "cause", "consequence", "left"
_SIGNS_OF_LIFE = *_ENDS, "alive"


class Line(NamedTuple):
    """One line of the board.

    Attributes:
        rank: Rank that wrote it.
        kind: "cause" (its failure), "consequence" (its failure, which another rank has caused),
            "left" (it has ended without failing), "alive" (it lives, and has noticed a failure),
            "stop" (its wish to stop), "ends" (what others must know where all stop) or "suspicion"
            (which rank it suspects).
        text: The failure, the sentence or the wish. Empty for "alive".
    """

    rank: int
    kind: str
    text: str

    def __str__(self) -> str:
        """Returns a sentence that names the rank as the one that failed first: see `seen`."""
        return f"Rank {self.rank} failed first: {self.text}"


class FailureBoard:
    """Shares failures and wishes to stop between the ranks of one run, through a key in the store.

    The key holds lines that ranks have appended. A rank reads all of them in one round trip. With
    one rank nothing is written, read or waited for.

    Args:
        attempt: Name of the run, equal on all ranks and not used before in this store. It keeps a
            run from reading the failure of an earlier run.
        rank: Rank of this process.
        world_size: Number of ranks.

    Attributes:
        has_failed: Whether an exception has ended this rank's run, also that of a wish to stop.
        seen: The first failure with a cause of its own. None means that this rank knows of none.
        asked: The largest wish to stop that this rank knows, as in `StopRequest`. 0 means no wish.
        launches: Returns what this rank has launched last, as `LaunchLog.last`. At first it returns
            no launches; to be assigned to. Any thread may call it.
        trip_s: Seconds that the last message to the store and back took, at most 1. 0 before the
            first one.
    """

    def __init__(self, attempt: str = "", rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.world_size = world_size
        self.has_failed = False
        self.seen: Line | None = None
        self.asked = 0
        self.trip_s = 0.0
        # `tuple()` is empty.
        self.launches: Callable[[], LastLaunches] = tuple
        self._attempt = attempt
        self._own: str | None = None
        self._lines: list[Line] = []
        self._num_agreements = 0
        self._is_store_gone = False
        self._mute: set[int] = set()

    def handle(self, exception: BaseException) -> None:
        """Reports this rank's failure and, if another rank caused it, logs which one.

        Blocks for at most about `2 * REPORT_WAIT_S`, and longer if the store does not answer or is
        far. On rank 0, which waits for the others to read, add up to `REPORT_WAIT_S` and, if
        another rank caused the failure, `WATCH_POLL_S`. Only the first call in a run acts.
        """
        has_failed, self.has_failed = self.has_failed, True
        if has_failed or self.world_size == 1:
            return
        self.report(self.rank, exception)
        is_suspicion = self.blame(exception) is not None
        if self.rank == 0:
            # The store ends with this process, so the other ranks must have read it before.
            others = {*range(self.world_size)} - self._mute
            self._poll(lambda store: others <= self._heard_by(store))
            time.sleep(WATCH_POLL_S * is_suspicion)

    def report(self, rank: int, exception: BaseException) -> None:
        """Writes a failure on the board. The first one with a cause of its own becomes `seen`."""
        message = self._own = describe(exception)
        kind = "consequence" if is_consequence(exception) else "cause"
        self._ask(lambda store: self._write_with_launches(store, Line(rank, kind, message)))

    def leave(self, how: str) -> None:
        """Writes on the board why this rank has ended without failing, for ranks that still wait.

        Args:
            how: Rest of a sentence that begins with "Rank" and the number of this rank.
        """
        line = Line(self.rank, "left", f"Rank {self.rank} {how}")
        self._ask(lambda store: self._write(store, line))

    def end_with(self, own: str) -> list[str]:
        """Tells all ranks this rank's `own` text, and returns everybody's, in rank order.

        Collective. Blocks. The list is empty if some rank has not called it within `END_WAIT_S`;
        other ranks, which have waited for longer, may then get all texts.
        """
        told: dict[int, str] = {}

        def is_complete(store: Any) -> bool:
            self.read(store)
            told.update(self._texts("ends"))
            return len(told) == self.world_size

        self._ask(lambda store: self._write(store, Line(self.rank, "ends", own)))
        self._ask(lambda store: _wait_until(lambda: is_complete(store), END_WAIT_S), 2 * END_WAIT_S)
        return (
            [told[rank] for rank in range(self.world_size)] if len(told) == self.world_size else []
        )

    def _write(self, store: Any, line: Line) -> None:
        """Appends a line, and reads all lines."""
        store.append(self._key("lines"), f"{json.dumps(line)}\n")
        self.read(store)

    def _write_with_launches(self, store: Any, line: Line) -> None:
        """Appends what this rank has launched last to a key that is read only once, and a line."""
        launched = self.rank, pack(self.launches())
        store.append(self._key("launches"), f"{json.dumps(launched)}\n")
        self._write(store, line)

    def read(self, store: Any) -> bool:
        """Reads all lines from `store`, and sets `seen`. Returns whether there is a failure.

        The lines are kept, since they cannot be read later, should the store end with rank 0.
        """
        begin_s = time.monotonic()
        # As long as nothing has happened, this is the only message to the store.
        has_lines = store.check([self._key("lines")])
        self.trip_s = min(time.monotonic() - begin_s, 1.0)
        if has_lines:
            lines = map(json.loads, store.get(self._key("lines")).decode().splitlines())
            read = [Line(rank, kind, _in_one_line(text)) for rank, kind, text in lines]
            with _keeping:
                # Another thread may have read more lines meanwhile.
                self._lines = max(self._lines, read, key=len)
        self.seen = next((one for one in self._lines if one.kind == "cause"), None)
        return self.seen is not None

    def _texts(self, *kinds: str) -> dict[int, str]:
        """Returns rank -> text of its last line of these kinds."""
        return {one.rank: one.text for one in self._lines if one.kind in kinds}

    def _heard_by(self, store: Any) -> set[int]:
        """Reads all lines. Returns the ranks that have failed or left, or noticed a failure."""
        self.read(store)
        return {*self._texts(*_SIGNS_OF_LIFE)}

    def notice(self, store: Any) -> bool:
        """Reads the board. Returns whether a rank has reported a failure.

        If one has, also writes on the board, once, that this rank lives. Reads the largest wish to
        stop into `asked`. If this rank's own is larger, writes it on the board.
        """
        self.read(store)
        told = max(map(int, self._texts("stop").values()), default=0)
        if self.asked > told:
            self._write(store, Line(self.rank, "stop", str(self.asked)))
        # Not written otherwise: a signal may have set it since it was read.
        if told > self.asked:
            self.asked = told
        if not self._texts("cause", "consequence"):
            return False
        if self.rank not in self._texts(*_SIGNS_OF_LIFE):
            self._write_with_launches(store, Line(self.rank, "alive", ""))
        return True

    def blame(self, exception: BaseException) -> str | None:
        """Finds out which rank failed first, if `exception` is only a consequence of that.

        Waits at most `REPORT_WAIT_S` for that rank's report, and as long again if a rank lives that
        has closed the connection. Without a report the sentence is a guess.
        Logs the sentence as an error, and adds it to the exception as a note (Python >= 3.11).

        Returns:
            The sentence. None means that `exception` is no consequence of another rank's failure.
        """
        if not is_consequence(exception):
            return None
        self._poll(lambda store: len(self._heard_by(store)) == self.world_size or bool(self.seen))
        closers = {int(rank) for rank in _CLOSED_BY.findall(str(exception))}
        if closers & {*self._texts("alive")}:
            # They live, and closed the connection because of a failure that they are to report.
            self._poll(lambda store: self.read(store) or closers <= {*self._texts(*_ENDS)})
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
        question = partial(self._verdict, key, state, timeout_s)
        verdict = self._ask(question, timeout_s + REPORT_WAIT_S + STORE_WAIT_S)
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
        thread.join(timeout_s + _NUM_TRIPS * self.trip_s)
        # The thread may still append one.
        answered = [*answers]
        self._is_store_gone = not answered
        return answered[0] if answered else None

    def _poll(self, question: Callable[[Any], bool]) -> None:
        """Waits until `question` is answered with yes, for at most about `REPORT_WAIT_S`."""
        timeout_s = REPORT_WAIT_S + _NUM_TRIPS * self.trip_s
        self._ask(
            lambda store: _wait_until(lambda: question(store), timeout_s), timeout_s + STORE_WAIT_S
        )

    def _suspicion(self) -> str:
        # What a rank has said about another one that ended without a report. It stands, and it may
        # be all that is known, if the store has ended with rank 0.
        said = [one.text for one in self._lines if one.kind in ("suspicion", "left")]
        if self._ask(self.read) is None:
            return (said or [_UNREADABLE])[0]
        sentence = self._suspect(self._texts("cause", "consequence"), self._texts("left"))
        if not self._mute and (found := self._ask(self._divergence)):
            # That is the cause, and what each rank printed tells only that it has waited.
            sentence = found if sentence.startswith(_NO_CAUSE) else f"{found} {sentence}"
        self._ask(lambda store: self._write(store, Line(self.rank, "suspicion", sentence)))
        return sentence

    def _divergence(self, store: Any) -> str:
        """Returns `divergence` of what ranks have launched last; "" where it is None."""
        has_lines = store.check([key := self._key("launches")])
        lines = store.get(key).decode().splitlines() if has_lines else ()
        return divergence({rank: unpack(text) for rank, text in map(json.loads, lines)}) or ""

    def _suspect(self, failed: dict[int, str], left: dict[int, str]) -> str:
        """Guesses from the ranks' reports which rank is gone, has ended, is cut off or hangs.

        Args:
            failed: Rank -> its failure, of ranks that have reported one.
            left: Rank -> why it has ended without failing.
        """
        silent = [rank for rank in range(self.world_size) if rank not in failed]
        mute = self._mute = {*silent} - {*self._texts(*_SIGNS_OF_LIFE)}
        reports = failed.values()
        # A process that dies closes its connections, and one that is stopped does not. A rank that
        # times out closes them, too, but it reports a failure.
        closed = {int(rank) for one in reports for rank in _CLOSED_BY.findall(one)}
        # torch's own calls, such as Lightning's broadcasts, do not name the rank.
        is_named = bool(closed) and all(_CLOSED_BY.search(one) for one in reports)
        is_late = any(_IS_LATE.search(one) for one in reports)
        dead = mute & closed if is_late or is_named else mute
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
        heads = [f"Rank {rank} says: {text[:_QUOTED_CHARS]}" for rank, text in failed.items()]
        return " ".join([_NO_CAUSE, *heads[:_QUOTED]])

    def _verdict(self, key: str, state: str, timeout_s: float, store: Any) -> str:
        store.append(f"{key}/states", f"{json.dumps([self.rank, state])}\n")
        decision, states = f"{key}/verdict", dict[int, str]()

        def have_all_come() -> bool:
            states.update(map(json.loads, store.get(f"{key}/states").decode().splitlines()))
            return len(states) == self.world_size

        _wait_until(lambda: have_all_come() or store.check([decision]), timeout_s)
        in_order = [state for _, state in sorted(states.items())]
        if len(states) < self.world_size:
            came = sorted(states)
            verdict = f"only ranks {came} of {self.world_size} came within {timeout_s:g} s"
        else:
            verdict = "yes" if len({*in_order}) == 1 else f"ranks stand at {in_order}"
        # The first verdict in the store is the verdict of all ranks.
        decided = _in_one_line(store.compare_set(decision, "", verdict).decode())
        store.add(f"{key}/heard", 1)
        if self.rank == 0 and decided == "yes":
            # The store ends with rank 0, so the other ranks must have read the verdict before.
            _wait_until(lambda: store.add(f"{key}/heard", 0) == self.world_size, REPORT_WAIT_S)
        return decided


def pack(launches: LastLaunches) -> str:
    """Compresses launches into a short text, since all ranks read those of all ranks."""
    return b64encode(compress(json.dumps([*launches]).encode())).decode()


def unpack(text: str) -> LastLaunches:
    """Returns what `pack` was given."""
    return list(map(tuple, json.loads(decompress(b64decode(text)))))


def _in_one_line(said: str) -> str:
    """Escapes line breaks in another rank's text, or it could pass for other output."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in said)


def _wait_until(is_so: Callable[[], bool], timeout_s: float) -> bool:
    end = time.monotonic() + timeout_s
    while not (answer := is_so()) and time.monotonic() < end:
        time.sleep(POLL_S)
    return answer
