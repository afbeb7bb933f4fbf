"""The fork server: a single-threaded process with torch imported, from which ranks are forked.

Importing torch takes seconds, forking a process that has imported it takes milliseconds. The
server also imports the modules of the functions that it is asked to run, once.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path

from tests.distributed.calls import Died, Hung, Outcome, Raised, RankCall, Returned, Stopped
from tests.distributed.rank import DUMP_SIGNAL, die_with_parent, run_rank, stack_file

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

STOP = b"stop"
"""Sent while a call runs, ends it: ranks that still run are killed."""

_STACK_WAIT_S = 2.0
_EXIT_WAIT_S = 2.0


def serve(connection: Connection, parent: int) -> None:
    """Answer every `RankCall` with a list of outcomes in rank order, or a traceback as text.

    Blocks until the other end closes or process `parent` ends.
    """
    os.setsid()
    die_with_parent(parent)
    # One thread each, set before torch and numpy are imported: forking a process that runs
    # other threads can leave locked locks behind in the child.
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    import torch.distributed  # noqa: F401

    # What is installed does not change; each new Trainer looks for plugins, for 50 ms.
    metadata.entry_points = cache(metadata.entry_points)
    kept: dict[int, list[_Rank]] = {}
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        if request == STOP:  # meant for a call that had ended by itself, or has just been ended
            continue
        # Pytest changes where its output goes, from test to test.
        outputs = [recv_handle(connection) for _ in range(2)]
        try:
            answer: list[Outcome] | str = _run(pickle.loads(request), connection, outputs, kept)
        except Exception:
            answer = traceback.format_exc()
        for output in outputs:
            os.close(output)
        connection.send(answer)


@dataclass(frozen=True)
class _Rank:
    pid: int
    pidfd: int
    link: Connection


def _run(
    call: RankCall, control: Connection, outputs: list[int], kept: dict[int, list[_Rank]]
) -> list[Outcome]:
    sys.path[:] = call.sys_path
    import torch._dynamo  # noqa: F401  # every optimizer imports it: 2 s, else on each rank

    with suppress(Exception):  # the ranks import it again and report what is wrong with it
        importlib.import_module(call.module)
    gc.freeze()
    directory = Path(tempfile.mkdtemp(prefix="ranks-"))
    ranks = _ready(kept.pop(call.world_size, [])) if call.keeps_ranks else []
    outcomes: dict[int, Outcome] = {}
    try:
        port = free_port()
        while len(ranks) < call.world_size:
            ranks.append(_fork_rank(control, outputs))
        for number, rank in enumerate(ranks):
            rank.link.send((call, number, port, directory))
            for output in outputs:
                send_handle(rank.link, output, rank.pid)
        outcomes = _watch(call, ranks, directory, control)
    finally:
        returned = [one for one in outcomes.values() if isinstance(one, Returned)]
        are_kept = call.keeps_ranks and len(returned) == call.world_size
        for rank in ranks:
            with suppress(OSError):
                rank.link.send(are_kept)
        if are_kept:
            kept[call.world_size] = ranks
        else:
            _end(ranks, outcomes)
        shutil.rmtree(directory, ignore_errors=True)
    return [outcomes[rank] for rank in range(call.world_size)]


def _fork_rank(control: Connection, outputs: list[int]) -> _Rank:
    link, theirs = Pipe()
    server = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        return _Rank(pid, os.pidfd_open(pid), link)
    try:
        os.setsid()
        die_with_parent(server)
        control.close()
        for output in outputs:
            os.close(output)
        run_rank(theirs)
    except BaseException:  # nothing may return into the server's loop
        traceback.print_exc()
    finally:
        os._exit(0)


def _ready(ranks: list[_Rank]) -> list[_Rank]:
    """Ranks of an earlier call, if none of them was changed by it; else none: they are ended."""
    with suppress(EOFError, ConnectionError):
        if all(rank.link.poll(_EXIT_WAIT_S) and rank.link.recv() for rank in ranks):
            return ranks
    _end(ranks, {})
    return []


def _watch(
    call: RankCall, ranks: list[_Rank], directory: Path, control: Connection
) -> dict[int, Outcome]:
    """Collect outcomes until all ranks have one, the time is up, or one rank's failure ends it."""
    outcomes: dict[int, Outcome] = {}
    deadline = end = time.monotonic() + call.timeout_s
    while pending := [rank for rank in range(call.world_size) if rank not in outcomes]:
        sources: list[Connection | int] = [control]
        for rank in pending:
            sources += [ranks[rank].link, ranks[rank].pidfd]
        ready = wait(sources, max(0.0, end - time.monotonic()))
        if not ready or control in ready:
            break
        for rank in pending:
            outcome = _outcome(ranks[rank], stack_file(directory, rank))
            if outcome is None:
                continue
            outcomes[rank] = outcome
            if call.grace_s is not None and not isinstance(outcome, Returned):
                end = min(end, time.monotonic() + call.grace_s)
    if not pending:
        return outcomes
    if end < deadline or control.poll():
        return outcomes | {rank: Stopped() for rank in pending}
    stacks = _stacks([ranks[rank] for rank in pending], [stack_file(directory, r) for r in pending])
    return outcomes | {rank: Hung(stack) for rank, stack in zip(pending, stacks, strict=True)}


def _outcome(rank: _Rank, stacks: Path) -> Outcome | None:
    with suppress(EOFError, ConnectionError):
        if rank.link.poll():
            received: Returned | Raised = rank.link.recv()
            return received
    if not wait([rank.pidfd], 0):
        return None
    # WNOWAIT leaves the process to `_end`, which reaps all of them alike.
    status = os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
    assert status is not None
    exited = status.si_code == os.CLD_EXITED
    stack = stacks.read_text() if stacks.exists() else ""
    return Died(time.monotonic(), status.si_status if exited else -status.si_status, stack)


def _stacks(ranks: list[_Rank], files: list[Path]) -> list[str]:
    for rank, file in zip(ranks, files, strict=True):
        if file.exists():  # else its handler is not there yet, and the signal would kill it
            signal.pidfd_send_signal(rank.pidfd, DUMP_SIGNAL)
    end = time.monotonic() + _STACK_WAIT_S
    written = [file for file in files if file.exists()]
    while time.monotonic() < end and not all(file.stat().st_size for file in written):
        time.sleep(0.01)
    time.sleep(0.05)  # the last lines may still be on their way
    return [file.read_text() if file.exists() else "" for file in files]


def _end(ranks: list[_Rank], outcomes: dict[int, Outcome]) -> None:
    end = time.monotonic() + _EXIT_WAIT_S
    for number, rank in enumerate(ranks):
        if isinstance(outcomes.get(number), Returned | Raised):
            wait([rank.pidfd], max(0.0, end - time.monotonic()))
    for rank in ranks:
        os.kill(rank.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
        with suppress(ProcessLookupError):  # the whole session: also what the rank has started
            os.killpg(rank.pid, signal.SIGKILL)
        os.waitpid(rank.pid, 0)
        os.close(rank.pidfd)
        rank.link.close()


def free_port() -> int:
    """A port of 127.0.0.1 that nobody has at present."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
