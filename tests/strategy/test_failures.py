"""The board on which ranks find the first failure, and the agreement that does not wait for ever.

Several boards in one process stand for ranks; they share a store as ranks do.
"""

from __future__ import annotations

import itertools
import logging
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lightning_dear import private_names
from lightning_dear.private_names import PrivateName
from lightning_dear.strategy import failure_watch, failures
from lightning_dear.strategy.failure_watch import FailureWatch, first_failure
from lightning_dear.strategy.failures import (
    FailureBoard,
    Line,
    describe,
    is_consequence,
    pack,
    unpack,
)

NUM_RANKS = 3
LATE = "[unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation to complete"
CLOSED = "[pair.cc:537] Read error [127.0.0.1]:57046: Connection reset by peer."


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(failures, "default_store", lambda: store)
    monkeypatch.setattr(failure_watch, "new_store_client", lambda *_: store)
    monkeypatch.setattr(failures, "REPORT_WAIT_S", 0.3)
    return store


@pytest.fixture
def boards(store: dist.Store) -> list[FailureBoard]:
    return [FailureBoard("attempt", rank, NUM_RANKS) for rank in range(NUM_RANKS)]


def first(board: FailureBoard) -> Line | None:
    """The first failure with a cause of its own; None if there is none, or no store."""
    board._ask(board.read)
    return board.seen


def in_time(call: Callable[[], Any], seconds: float = 5.0) -> Any:
    start_s = time.monotonic()
    value = call()
    assert time.monotonic() - start_s < seconds
    return value


@pytest.mark.parametrize(
    "message",
    [
        CLOSED,
        "Connection closed by peer [127.0.0.1]:46760. This is typically caused by a crash.",
        "[unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete",
        "[pair.cc:553] Read error [10.0.0.2]:5412: Connection timed out",
        "[pair.cc:553] Read error [10.0.0.2]:5412: No route to host",
        "[pair.cc:553] writev [10.0.0.2]:5412: Network is unreachable",
        "Application timeout caused pair closure",
        "wait timeout after 300000ms, keys: /default_pg/0/store_based_barrier",
        "NCCL communicator was aborted on rank 2.",
    ],
)
def test_what_a_lost_peer_sounds_like(message: str) -> None:
    assert is_consequence(RuntimeError(message))
    assert not is_consequence(ValueError(message))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("DataLoader timed out after 30 seconds"),
        RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."),
        TimeoutError("Timed out waiting 5000ms"),
        KeyboardInterrupt(),
    ],
)
def test_what_is_a_cause_of_its_own(error: BaseException) -> None:
    assert not is_consequence(error)


def test_the_root_of_a_chain_decides() -> None:
    def chained(first: BaseException, second: BaseException, how: str) -> BaseException:
        try:
            try:
                raise first
            except BaseException as error:
                if how == "from":
                    raise second from error
                raise second  # noqa: B904
        except BaseException as error:
            return error

    closed, mistake = RuntimeError(CLOSED), ValueError("mistake")
    assert is_consequence(chained(closed, ValueError("wrapped"), "from"))
    assert not is_consequence(chained(mistake, RuntimeError(CLOSED), "while"))


@pytest.mark.parametrize("message", [CLOSED, "mistake"])
def test_errors_that_cause_each_other_have_an_end(message: str) -> None:
    def caused_by(error: BaseException, causes: list[BaseException]) -> BaseException:
        for one, cause in zip([error, *causes], [*causes, error], strict=True):
            one.__cause__ = cause
        return error

    for causes in ([], [RuntimeError(message)], [ValueError("wrapped"), RuntimeError(message)]):
        error = caused_by(RuntimeError(message), causes)
        assert in_time(lambda error=error: is_consequence(error)) == (message == CLOSED)


def test_describe() -> None:
    assert describe(ValueError("bad batch")) == "ValueError: bad batch"
    assert describe(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert len(describe(ValueError("x" * 10**6))) < 10**4


def test_the_first_cause_stays(boards: list[FailureBoard]) -> None:
    assert first(boards[2]) is None
    boards[0].report(0, RuntimeError(CLOSED))
    boards[1].report(1, ValueError("bad batch\nof two lines"))
    boards[2].report(2, KeyError("later"))
    expected = Line(1, "cause", "ValueError: bad batch\\nof two lines")
    assert [first(board) for board in boards] == [expected] * NUM_RANKS
    assert str(expected) == "Rank 1 failed first: ValueError: bad batch\\nof two lines"


def test_what_another_rank_says_looks_like_no_other_line(
    boards: list[FailureBoard], caplog: pytest.LogCaptureFixture
) -> None:
    forged = "\x1b[2K\rüber\nERROR rank 0: \x00 all is well\u2028\u202eno"
    boards[1].report(1, ValueError(forged))
    sentence = boards[0].blame(RuntimeError(CLOSED))
    shown = r"\x1b[2K\rüber\nERROR rank 0: \x00 all is well\u2028\u202eno"
    assert sentence == f"Rank 1 failed first: ValueError: {shown}"
    assert all(record.getMessage().isprintable() for record in caplog.records)
    assert f"ValueError: {shown}" in caplog.text


def test_a_rank_that_lives_and_has_closed_a_connection_is_waited_for(
    boards: list[FailureBoard],
) -> None:
    closed = [RuntimeError(f"connection closed by rank {rank}: {CLOSED}") for rank in range(3)]
    boards[0].report(0, closed[1])
    boards[1]._ask(boards[1].notice)

    def fail_later() -> None:
        time.sleep(0.4)
        boards[1].report(1, closed[2])

    with ThreadPoolExecutor() as pool:
        later = pool.submit(fail_later)
        sentence = boards[0].blame(closed[1])
        later.result()
    assert str(sentence).startswith("Ranks [2] are gone without a report.")


def test_after_a_timeout_torchs_own_record_is_written(
    boards: list[FailureBoard],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "rank_"))
    watches = [FailureWatch(board, timedelta(seconds=40)) for board in boards]
    watches[0].handle(RuntimeError(CLOSED))
    assert not [*tmp_path.iterdir()]
    # `CompletionGuard` calls it, and later `on_exception`.
    for _ in range(2):
        watches[1].handle(RuntimeError(LATE))
    assert {"version", "entries"} <= {*pickle.loads((tmp_path / "rank_1").read_bytes())}
    told = f"Rank 1 has written its last collectives to {tmp_path / 'rank_1'}."
    assert caplog.text.count(told) == 1
    # A torch without it writes nothing, and says nothing.
    gone = PrivateName("torch._C._distributed_c10d", "_no_such_name")
    monkeypatch.setattr(private_names, "FLIGHT_RECORD", gone)
    watches[2].handle(RuntimeError(LATE))
    assert "Rank 2 has written" not in caplog.text


def test_another_attempt_sees_nothing_of_it(boards: list[FailureBoard]) -> None:
    boards[1].report(1, ValueError("bad batch"))
    assert first(FailureBoard("another", 0, NUM_RANKS)) is None


def test_a_consequence_is_told_whose_it_is(
    boards: list[FailureBoard], caplog: pytest.LogCaptureFixture
) -> None:
    boards[1].report(1, ValueError("bad batch"))
    error = RuntimeError(CLOSED)
    with caplog.at_level(logging.ERROR):
        assert boards[0].blame(error) == "Rank 1 failed first: ValueError: bad batch"
    assert "Rank 1 failed first: ValueError: bad batch" in caplog.text
    if sys.version_info >= (3, 11):
        assert error.__notes__ == ["Rank 1 failed first: ValueError: bad batch"]


def test_a_report_that_comes_a_little_later(boards: list[FailureBoard]) -> None:
    timer = threading.Timer(0.1, boards[1].report, (1, ValueError("bad batch")))
    timer.start()
    assert "bad batch" in boards[0].blame(RuntimeError(CLOSED))
    timer.join()


def test_nobody_is_blamed_for_ones_own_mistake(boards: list[FailureBoard]) -> None:
    boards[1].report(1, ValueError("bad batch"))
    assert boards[0].blame(KeyError("own")) is None


def test_the_dead_and_the_hanging_are_told_apart(
    boards: list[FailureBoard], store: dist.Store
) -> None:
    boards[0].report(0, RuntimeError(CLOSED))
    assert boards[0].blame(RuntimeError(CLOSED)).startswith("Ranks [1, 2] are gone")
    boards[1].notice(store)
    assert boards[0].blame(RuntimeError(CLOSED)).startswith("Ranks [2] are gone")
    boards[2].notice(store)
    assert boards[0].blame(RuntimeError(CLOSED)).startswith("Ranks [1, 2] did not come")
    for rank in (1, 2):
        boards[rank].report(rank, RuntimeError(CLOSED))
    assert boards[0].blame(RuntimeError(CLOSED)).startswith("No rank has reported a cause")


def blamed(board: FailureBoard, message: str) -> str:
    board.report(board.rank, RuntimeError(message))
    sentence = board.blame(RuntimeError(message))
    assert sentence is not None
    return sentence


def test_a_report_that_names_no_rank_leaves_every_mute_rank_dead(
    boards: list[FailureBoard],
) -> None:
    """Rank 2 is dead. Rank 1 finds out in one of torch's own calls, and by ending ends rank 0."""
    boards[1].report(1, RuntimeError(CLOSED))
    closed = f"bucket 3, reduce-scatter: connection closed by rank 1. ({CLOSED})"
    assert blamed(boards[0], closed).startswith("Ranks [2] are gone")
    assert blamed(boards[1], CLOSED).startswith("Ranks [2] are gone")


def test_one_that_is_silent_is_not_called_dead(
    boards: list[FailureBoard], store: dist.Store
) -> None:
    """Rank 1 stands still. Rank 0 waits in vain, and by ending ends its connection to rank 2."""
    boards[0].report(0, RuntimeError(LATE))
    boards[2].notice(store)
    late = f"bucket 3, reduce-scatter: nothing from rank 1 for 8 s: link or rank. ({LATE})"
    assert blamed(boards[0], late).startswith("Ranks [1] neither send nor answer")
    closed = f"bucket 3, reduce-scatter: connection closed by rank 0. ({CLOSED})"
    assert blamed(boards[2], closed).startswith("Ranks [1] neither send nor answer")


def test_one_whose_connection_was_closed_is_dead_whoever_else_is_late(
    boards: list[FailureBoard],
) -> None:
    blamed(boards[0], f"bucket 3, reduce-scatter: connection closed by rank 1. ({CLOSED})")
    assert blamed(boards[2], LATE).startswith("Ranks [1] are gone without a report")


def test_nobody_is_named_where_nobody_can_know(boards: list[FailureBoard]) -> None:
    for board in boards:
        sentence = blamed(board, LATE)
    assert sentence.startswith("No rank has reported a cause of its own")
    assert f"Rank 1 says: RuntimeError: {LATE}" in sentence


def test_ranks_that_wait_for_each_other_in_vain_are_told_so(boards: list[FailureBoard]) -> None:
    for board, last in zip(boards, ("norm", "weights", "weights"), strict=True):
        board.launches = lambda last=last: [("sum", 3, -1), (last, 1, -1)]
    sentences = [blamed(board, LATE) for board in boards]
    assert sentences[-1].startswith(
        "Ranks may have launched different messages: rank 0 norm, and rank 1 weights. Call"
    )
    # What each printed first is that it waited.
    assert sentences[-1].endswith("in the same order on all ranks.")


def test_one_that_did_not_come_is_also_named(boards: list[FailureBoard], store: dist.Store) -> None:
    for board, last in zip(boards, ("norm", "weights", "weights"), strict=True):
        board.launches = lambda last=last: [(last, 1, -1)]
    boards[0].report(0, RuntimeError(LATE))
    boards[1].notice(store)
    boards[2].notice(store)
    said = boards[0].blame(RuntimeError(LATE))
    assert said is not None
    assert said.startswith("Ranks may have launched different messages: rank 0 norm, and rank 1 we")
    assert " on all ranks. Ranks [1, 2] did not come to a collective." in said


@given(st.lists(st.tuples(st.text(), st.integers(), st.integers())))
def test_launches_come_out_of_a_line_as_they_were(launches: Any) -> None:
    text = pack(launches)
    assert unpack(text) == launches
    assert text.isprintable()


class _Far:
    """A store whose answers take `trip_s`."""

    def __init__(self, store: dist.Store, trip_s: float) -> None:
        self._store, self._trip_s = store, trip_s

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            time.sleep(self._trip_s / 2)
            answer = getattr(self._store, name)(*arguments)
            time.sleep(self._trip_s / 2)
            return answer

        return call


@pytest.mark.parametrize("trip_s", [0.04, 0.2])
@pytest.mark.parametrize("num_ranks", [8, 32])
def test_no_rank_that_lives_is_called_dead_over_a_slow_link(
    num_ranks: int, trip_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 does not come to a collective, and rank 2 is dead."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    far: Any = _Far(store, trip_s)
    monkeypatch.setattr(failures, "default_store", lambda: far)
    monkeypatch.setattr(failure_watch, "new_store_client", lambda *_: far)
    boards = [FailureBoard("attempt", rank, num_ranks) for rank in range(num_ranks)]
    watches = [FailureWatch(board, timedelta(seconds=60)) for board in boards if board.rank != 2]
    time.sleep(failures.WATCH_POLL_S + 2 * trip_s)
    late = RuntimeError(f"bucket 3, reduce-scatter: nothing from rank 1 for 8 s. ({LATE})")
    others = [board for board in boards if board.rank not in (1, 2)]

    def fail(board: FailureBoard) -> str | None:
        board.report(board.rank, late)
        return board.blame(late)

    start_s = time.monotonic()
    with ThreadPoolExecutor(len(others)) as pool:
        sentences = [*pool.map(fail, others)]
    for watch in watches:
        watch.close()
    assert time.monotonic() - start_s < 3 + 15 * trip_s
    assert {sentence[:40] for sentence in sentences if sentence} == {
        "Ranks [2] neither send nor answer. See wh"[:40]
    }


def test_where_the_store_is_far_reports_may_come_later(
    boards: list[FailureBoard], store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    trip_s = 0.5
    far: Any = _Far(store, trip_s)
    monkeypatch.setattr(failures, "default_store", lambda: far)
    for board in boards:
        board.read(far)  # which measures a trip
    boards[0].report(0, RuntimeError(CLOSED))
    # A report is at the store after one and a half trips: later than without trips in the wait.
    late = [
        threading.Timer(failures.REPORT_WAIT_S + 2.8 * trip_s, board.report, args=(board.rank, one))
        for board, one in zip(boards[1:], [RuntimeError(CLOSED)] * 2, strict=True)
    ]
    for timer in late:
        timer.start()
    sentence = boards[0].blame(RuntimeError(CLOSED))
    for timer in late:
        timer.join()
    assert sentence.startswith("No rank has reported a cause")


def test_one_that_has_ended_well_is_named(boards: list[FailureBoard], store: dist.Store) -> None:
    boards[1].leave("has ended its training after 5 batches")
    boards[2].notice(store)
    closed = f"bucket 3, reduce-scatter: connection closed by rank 1. ({CLOSED})"
    assert blamed(boards[0], closed) == "Rank 1 has ended its training after 5 batches"


def test_how_one_has_ended_is_told_in_one_line(
    boards: list[FailureBoard], store: dist.Store
) -> None:
    boards[1].leave("has ended\nRank 2 failed first")
    boards[2].notice(store)
    closed = f"bucket 3, reduce-scatter: connection closed by rank 1. ({CLOSED})"
    assert blamed(boards[0], closed) == "Rank 1 has ended\\nRank 2 failed first"


def test_the_end_of_one_outlives_the_store(
    boards: list[FailureBoard], store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    boards[0].leave("has ended its training after 5 batches")
    boards[1].notice(store)
    monkeypatch.setattr(failures, "default_store", _DeadStore)
    assert boards[1].blame(RuntimeError(CLOSED)) == "Rank 0 has ended its training after 5 batches"


def test_a_wish_to_stop_reaches_all(boards: list[FailureBoard], store: dist.Store) -> None:
    boards[2].asked = 3
    assert [board.notice(store) for board in reversed(boards)] == [False] * NUM_RANKS
    assert [board.asked for board in boards] == [3] * NUM_RANKS


def test_the_largest_wish_to_stop_reaches_all(
    boards: list[FailureBoard], store: dist.Store
) -> None:
    sigterm, ctrl_c = 1, 130
    boards[0].asked, boards[1].asked = sigterm, ctrl_c
    for board in [*boards, *boards]:
        board.notice(store)
    assert [board.asked for board in boards] == [ctrl_c] * NUM_RANKS


class _Signalled(FailureBoard):
    """A board whose rank gets a signal right after one of the times that `asked` is read."""

    _asked, num_reads = 0, -1

    @property
    def asked(self) -> int:
        before = self._asked
        self.num_reads -= 1
        self._asked = 130 if self.num_reads == 0 else before
        return before

    @asked.setter
    def asked(self, value: int) -> None:
        self._asked = value


@pytest.mark.parametrize("num_reads", [1, 2])
def test_a_signal_that_comes_while_the_board_is_read_is_kept(
    num_reads: int, store: dist.Store
) -> None:
    board = _Signalled("attempt", 0, NUM_RANKS)
    board.num_reads = num_reads
    board.notice(store)
    assert board.asked == 130


def test_a_suspicion_outlives_the_store(
    boards: list[FailureBoard], store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 2 dies, rank 0 notices, says so and ends; only then rank 1 loses a connection."""
    watch = FailureWatch(boards[1], timedelta(seconds=60))
    boards[0].report(0, RuntimeError(CLOSED))
    while 1 not in boards[0]._texts("alive"):
        first(boards[0])
    sentence = boards[0].blame(RuntimeError(CLOSED))
    while not boards[1]._texts("suspicion"):
        time.sleep(0.01)
    monkeypatch.setattr(failures, "default_store", _DeadStore)
    assert boards[1].blame(RuntimeError(CLOSED)) == sentence
    assert sentence.startswith("Ranks [2] are gone")
    watch.close()


class _DeadStore:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("Connection refused")


class _StuckStore:
    def __getattr__(self, name: str) -> Any:
        return lambda *_: time.sleep(60)


@pytest.mark.parametrize("kind", [_DeadStore, _StuckStore, lambda: None])
def test_without_a_store_nothing_raises_or_waits(
    kind: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "default_store", kind)
    monkeypatch.setattr(failures, "STORE_WAIT_S", 0.2)
    board = FailureBoard("attempt", 1, NUM_RANKS)
    in_time(lambda: board.handle(ValueError("bad batch")))
    assert in_time(lambda: first(board)) is None
    sentence = in_time(lambda: board.blame(RuntimeError(CLOSED)))
    assert "See what rank 0 printed last" in sentence
    with pytest.raises(RuntimeError, match="store is gone.*ValueError: bad batch"):
        in_time(lambda: board.agree("collect the state", timeout_s=0.2))


def test_one_process_has_nobody_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "default_store", _StuckStore)
    board = FailureBoard()
    in_time(lambda: board.handle(ValueError("bad batch")), 0.1)
    in_time(lambda: board.agree("collect the state"), 0.1)


def agreements(boards: list[FailureBoard], states: list[str], timeout_s: float) -> list[str]:
    """What became of each board's `agree`, called at the same time."""

    def outcome(board: FailureBoard, state: str) -> str:
        try:
            board.agree("collect the state", state, timeout_s)
        except RuntimeError as error:
            return str(error)
        return "yes"

    with ThreadPoolExecutor(len(boards)) as pool:
        return list(pool.map(outcome, boards, states))


def test_all_agree(boards: list[FailureBoard]) -> None:
    for _ in range(2):
        assert agreements(boards, ["step 3"] * NUM_RANKS, 5.0) == ["yes"] * NUM_RANKS


def test_some_do_not_come(boards: list[FailureBoard]) -> None:
    boards[1].report(1, ValueError("bad batch"))
    first(boards[2])
    outcomes = in_time(lambda: agreements(boards[1:], ["step 3"] * 2, 0.3))
    expected = "Cannot collect the state: only ranks [1, 2] of 3 came within 0.3 s. Resume"
    assert all(outcome.startswith(expected) for outcome in outcomes)
    assert all("ValueError: bad batch" in outcome for outcome in outcomes)
    # Who comes late hears the same at once, and does not wait for those who have gone.
    (late,) = in_time(lambda: agreements(boards[:1], ["step 3"], 60.0))
    assert late.startswith(expected)


def test_ranks_at_different_steps_do_not_agree(boards: list[FailureBoard]) -> None:
    outcomes = agreements(boards, ["step 3", "step 4", "step 3"], 5.0)
    assert all("ranks stand at ['step 3', 'step 4', 'step 3']" in one for one in outcomes)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The reasons for which watches would have ended this process. They look often."""
    monkeypatch.setattr(failure_watch, "WATCH_POLL_S", 0.05)
    reasons: list[str] = []
    monkeypatch.setattr(FailureWatch, "_end", lambda _, why: reasons.append(why))
    return reasons


@pytest.fixture
def watch_all(
    boards: list[FailureBoard], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[float], list[FailureWatch]]]:
    monkeypatch.setattr(failure_watch, "WATCH_POLL_S", 0.05)
    made: list[FailureWatch] = []

    def make(timeout_s: float) -> list[FailureWatch]:
        made.extend(FailureWatch(board, timedelta(seconds=timeout_s)) for board in boards)
        return made

    yield make
    for watch in made:
        watch.close()


def test_rank_0_stays_until_its_failure_has_been_read(
    watch_all: Callable[[float], list[FailureWatch]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "REPORT_WAIT_S", 5.0)
    watches = watch_all(60.0)
    in_time(lambda: watches[0].handle(ValueError("bad batch")), 4.0)
    expected = Line(0, "cause", "ValueError: bad batch")
    assert [watch.board.seen for watch in watches[1:]] == [expected] * 2
    assert first_failure() == expected


def test_a_rank_that_never_notices_is_ended(
    watch_all: Callable[[float], list[FailureWatch]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: dict[int, float] = {}
    monkeypatch.setattr(
        FailureWatch, "_end", lambda self, _: ended.setdefault(self.board.rank, time.monotonic())
    )
    watches = watch_all(2.0)
    start_s = time.monotonic()
    watches[0].handle(ValueError("bad batch"))
    watches[1].close()
    while not ended and time.monotonic() < start_s + 30:
        time.sleep(0.05)
    assert ended.keys() == {2}
    assert ended[2] - start_s > 1.9


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_rank_whose_store_is_gone_is_ended(
    comes_back: bool,
    boards: list[FailureBoard],
    store: dist.Store,
    ended: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clients = [_DeadStore(), _DeadStore(), store if comes_back else _DeadStore()]
    monkeypatch.setattr(
        failure_watch,
        "new_store_client",
        lambda *_: clients.pop(0) if len(clients) > 1 else clients[0],
    )
    start_s = time.monotonic()
    watch = FailureWatch(boards[1], timedelta(seconds=1))
    while not ended and time.monotonic() < start_s + (2 if comes_back else 20):
        time.sleep(0.05)
    watch.close()
    assert time.monotonic() - start_s > 0.9
    assert len(ended) == (0 if comes_back else 1)


@pytest.mark.parametrize("num_failures", [1, 10**9])
def test_a_watch_that_cannot_connect_at_first_tries_again(
    num_failures: int,
    boards: list[FailureBoard],
    store: dist.Store,
    ended: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries = itertools.count()

    def connect(*_: float) -> dist.Store:
        if next(tries) < num_failures:
            raise RuntimeError("Connection refused")
        return store

    monkeypatch.setattr(failure_watch, "new_store_client", connect)
    watch = FailureWatch(boards[1], timedelta(seconds=1))
    boards[0].report(0, ValueError("bad batch"))
    end_s = time.monotonic() + 20
    while not (ended or boards[1].seen) and time.monotonic() < end_s:
        time.sleep(0.05)
    watch.close()
    assert boards[1].seen if num_failures == 1 else ended == ["Rank 0 does not answer."]


def test_a_watch_goes_on_although_a_wish_to_stop_cannot_be_passed_on(
    boards: list[FailureBoard],
    store: dist.Store,
    ended: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = FailureWatch(boards[1], timedelta(seconds=0))

    def fail(asked: int) -> None:
        raise AttributeError("no trainer")

    watch.on_asked = fail
    boards[0].asked = 3
    boards[0].notice(store)
    # Longer than until a watch that reads nothing ends its rank.
    time.sleep(failure_watch.RAISING_S + 1.0)
    assert not ended
    boards[0].report(0, ValueError("bad batch"))
    end_s = time.monotonic() + 10
    while not boards[1].seen and time.monotonic() < end_s:
        time.sleep(0.05)
    watch.close()
    assert boards[1].seen
    assert caplog.text.count("Rank 1 cannot be told to stop") == 1
    assert "no trainer" in caplog.text


def test_a_rank_whose_store_does_not_answer_is_ended(
    boards: list[FailureBoard], ended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is stopped: whoever asks its store waits for ever."""
    monkeypatch.setattr(failure_watch, "new_store_client", lambda *_: _StuckStore())
    start_s = time.monotonic()
    watch = FailureWatch(boards[1], timedelta(seconds=1))
    while not ended and time.monotonic() < start_s + 20:
        time.sleep(0.05)
    watch.close()
    assert ended == ["Rank 0 does not answer."]


@pytest.mark.parametrize("ends_by_itself", [True, False])
def test_who_does_not_notice_a_failure_aborts_soon(
    boards: list[FailureBoard], monkeypatch: pytest.MonkeyPatch, ends_by_itself: bool
) -> None:
    monkeypatch.setattr(failure_watch, "WATCH_POLL_S", 0.05)
    monkeypatch.setattr(failure_watch, "ABORT_S", 0.4)
    aborted: list[float] = []
    watch = FailureWatch(boards[1], timedelta(seconds=60))
    watch.on_failed = lambda: aborted.append(time.monotonic())
    start_s = time.monotonic()
    boards[0].report(0, ValueError("its own"))
    while not boards[1].seen:
        time.sleep(0.01)
    if ends_by_itself:
        watch.handle(RuntimeError(CLOSED))
    while not aborted and time.monotonic() < start_s + (1.0 if ends_by_itself else 5.0):
        time.sleep(0.01)
    watch.close()
    assert len(aborted) == (0 if ends_by_itself else 1)


def test_a_watch_is_pickled_as_of_no_run(watch_all: Any) -> None:
    copied = pickle.loads(pickle.dumps(watch_all(1.0)[0]))
    assert copied.board.world_size == 1
