"""Run a function on real gloo ranks from a test, and fail with the rank's own words.

    def _sum(value: float) -> float:
        tensor = torch.full((1,), value)
        dist.all_reduce(tensor)
        return tensor.item()

    def test_sum() -> None:
        assert run_ranks(_sum, 3, 1.0) == [3.0, 3.0, 3.0]

The function must live at the top of a module: ranks find it by name.
"""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Pipe
from multiprocessing.reduction import send_handle
from typing import Any, TypeVar

import pytest

from tests.distributed.calls import Died, Host, Hung, Outcome, Raised, RankCall, Returned, Stopped
from tests.distributed.rank import BODY
from tests.distributed.server import STOP, THREAD_VARIABLES, serve

T = TypeVar("T")

GRACE_S = 0.5
"""How long after the first failure other ranks may still report an earlier one."""

_CONSEQUENCE = re.compile(
    r"Connection closed by peer|Connection reset|Broken pipe|peer closed|[Ss]ocket closed"
)
"""What gloo says on a rank whose peer has gone."""


class RanksFailed(AssertionError):
    """A rank raised, died or hung.

    Attributes:
        rank: The first rank that failed, or the first that hung.
        outcomes: What became of every rank, in rank order.
    """

    def __init__(self, message: str, rank: int, outcomes: Sequence[Outcome]) -> None:
        super().__init__(message)
        self.rank = rank
        self.outcomes = outcomes


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout_s: float = 60,
    env: Mapping[str, str] | None = None,
    hosts: Sequence[Host] | None = None,
    init_process_group: bool = True,
    keeps_ranks: bool = False,
    **kwargs: Any,
) -> list[T]:
    """Run `fn(*args, **kwargs)` in `world_size` processes and return their results in rank order.

    Each rank has one thread, the caller's environment, directory and `sys.path`, the variables
    of `torchrun` (`RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`,
    `MASTER_PORT`) and an initialised gloo process group. Ranks stay alive until all have
    returned. What they print goes where the caller's own output goes, to pytest. Blocks.

    Args:
        fn: A function at the top of an importable module.
        world_size: How many ranks.
        *args: Arguments of `fn`; pickled.
        timeout_s: Seconds after which ranks that still run are killed.
        env: Environment variables set on top of all others.
        hosts: One host per rank: rank r runs in the network namespace of `hosts[r]`. A host may
            stand there more than once. None: all ranks on this machine's loopback.
        init_process_group: False leaves that to `fn`.
        keeps_ranks: Whether to use the ranks of an earlier such call, and to keep them for another:
            a process less, with what its first step costs. For functions that leave nothing behind
            but modules, or settings that `rank.py` looks at. Not with `hosts`.
        **kwargs: Keyword arguments of `fn`; pickled.

    Raises:
        RanksFailed: A rank raised, died or hung. The message has the first failing rank's
            traceback, or the stacks of the ranks that hung.
    """
    __tracebackhide__ = True
    call = _call(fn, world_size, args, kwargs, timeout_s, env, hosts, init_process_group)
    return _results(replace(call, keeps_ranks=keeps_ranks))


def observe_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60,
    env: Mapping[str, str] | None = None,
    hosts: Sequence[Host] | None = None,
    init_process_group: bool = True,
    **kwargs: Any,
) -> list[Outcome]:
    """Like `run_ranks`, but return what becomes of each rank if the others are left to run.

    For tests of what the peers of a failing rank see: a rank that raises exits at once, and the
    others go on until they end or `timeout_s` is over.
    """
    call = _call(
        fn, world_size, args, kwargs, timeout_s, env, hosts, init_process_group, observe=True
    )
    return _server().run(call)


def distributed(
    world_sizes: Sequence[Any] = (1, 2, 3, 4), timeout_s: float = 60, keeps_ranks: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test function the body that every rank runs, once per world size.

    The test may take parameters (of `pytest.mark.parametrize`, or fixtures whose values can be
    pickled), and `world_size` if it names it. One that takes `monkeypatch` never keeps its ranks,
    as nobody undoes there what that does; see `run_ranks` for others that should not.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(body).parameters

        @functools.wraps(body)
        def test(**kwargs: Any) -> None:
            __tracebackhide__ = True
            world_size = kwargs["world_size"]
            passed = {name: kwargs[name] for name in parameters}
            call = _call(body, world_size, (), passed, timeout_s)
            _results(replace(call, keeps_ranks=keeps_ranks and "monkeypatch" not in passed))

        world_size = inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)
        others = [parameter for name, parameter in parameters.items() if name != "world_size"]
        setattr(test, "__signature__", inspect.Signature([*others, world_size]))  # noqa: B010
        setattr(test, BODY, body)
        return pytest.mark.parametrize("world_size", world_sizes)(test)

    return decorate


def start_server() -> None:
    """Fork the server that ranks are forked from; a no-op when it runs already.

    To be called before the process starts threads, so that the fork is safe: `conftest.py` does.

    Raises:
        RuntimeError: This process already runs several threads.
    """
    _server()


def stop_server() -> None:
    """End the fork server and wait for it; a no-op when none runs."""
    global _running
    if _running is not None:
        _running.close()
        _running = None


class _Server:
    def __init__(self) -> None:
        if threading.active_count() > 1:
            raise RuntimeError(
                "the fork server must start before other threads do: "
                "call tests.distributed.harness.start_server() in conftest.py"
            )
        self._lock = threading.Lock()
        self._connection, theirs = Pipe()
        client = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._connection.close()
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                serve(theirs, client)
            except BaseException:  # nothing may return into the caller's stack
                traceback.print_exc()
            finally:
                os._exit(0)
        theirs.close()

    def run(self, call: RankCall) -> list[Outcome]:
        with self._lock:
            try:
                self._connection.send(call)
                for output in (1, 2):
                    send_handle(self._connection, output, self.pid)
                answer: list[Outcome] | str = self._connection.recv()
            except (EOFError, BrokenPipeError):
                raise RuntimeError("the fork server died: see its traceback above") from None
            except BaseException:  # Ctrl-C or a test's own timeout
                self._connection.send_bytes(STOP)
                self._connection.recv()
                raise
        if isinstance(answer, str):
            raise RuntimeError(f"the fork server failed:\n{answer}")
        return answer

    def close(self) -> None:
        self._connection.close()
        os.kill(self.pid, signal.SIGKILL)  # it may still be importing torch
        os.waitpid(self.pid, 0)


_running: _Server | None = None


def _server() -> _Server:
    global _running
    if _running is None:
        _running = _Server()
    return _running


def _call(
    fn: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    hosts: Sequence[Host] | None = None,
    init_process_group: bool = True,
    observe: bool = False,
) -> RankCall:
    if "<" in fn.__qualname__ or fn.__module__ == "__main__":
        raise ValueError(f"{fn.__qualname__} must be a function at the top of an importable module")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size}")
    if hosts is not None and len(hosts) != world_size:
        raise ValueError(f"hosts must name one host per rank: {len(hosts)} for {world_size} ranks")
    return RankCall(
        module=fn.__module__,
        qualname=fn.__qualname__,
        arguments=pickle.dumps((args, kwargs), pickle.HIGHEST_PROTOCOL),
        world_size=world_size,
        timeout_s=timeout_s,
        grace_s=None if observe else GRACE_S,
        linger=not observe,
        init_process_group=init_process_group,
        keeps_ranks=False,
        env={**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1"), **(env or {})},
        hosts=None if hosts is None else tuple(hosts),
        cwd=os.getcwd(),
        sys_path=tuple(sys.path),
    )


def _results(call: RankCall) -> list[Any]:
    __tracebackhide__ = True
    outcomes = _server().run(call)
    rank = _first_failure(outcomes)
    if rank is not None:
        raise RanksFailed(_describe(call, outcomes, rank), rank, outcomes)
    return [pickle.loads(outcome.value) for outcome in outcomes if isinstance(outcome, Returned)]


def _first_failure(outcomes: Sequence[Outcome]) -> int | None:
    """The rank whose failure came first, passing over those that only lost a peer."""
    failed = [
        (_is_consequence(outcome), outcome.time_s, rank)
        for rank, outcome in enumerate(outcomes)
        if isinstance(outcome, Raised | Died)
    ]
    if failed:
        return min(failed)[2]
    unfinished = (r for r, outcome in enumerate(outcomes) if not isinstance(outcome, Returned))
    return next(unfinished, None)


def _is_consequence(outcome: Outcome) -> bool:
    return isinstance(outcome, Raised) and bool(_CONSEQUENCE.search(outcome.message))


def _describe(call: RankCall, outcomes: Sequence[Outcome], first: int) -> str:
    lines = [f"{call.qualname}: {_sentence(call, first, outcomes[first])}"]
    for rank, outcome in enumerate(outcomes):
        if rank != first:
            lines.append(f"  {_sentence(call, rank, outcome)}")
    shown = [(first, outcomes[first])]
    shown += [(r, o) for r, o in enumerate(outcomes) if isinstance(o, Hung) and r != first]
    lines += [f"\n--- rank {rank} ---\n{text}" for rank, o in shown if (text := _details(o))]
    return "\n".join(lines)


def _sentence(call: RankCall, rank: int, outcome: Outcome) -> str:
    where = f"rank {rank} of {call.world_size}"
    match outcome:
        case Returned():
            return f"{where} returned"
        case Raised(message=message):
            return f"{where} raised {message.splitlines()[0]}"
        case Died(exit_code=code) if code < 0:
            return f"{where} was killed by {signal.Signals(-code).name}"
        case Died(exit_code=code):
            return f"{where} exited with code {code} before it returned"
        case Hung():
            return f"{where} hung: killed after {call.timeout_s:g} s"
        case Stopped():
            return f"{where} was still running and was stopped"


def _details(outcome: Outcome) -> str:
    match outcome:
        case Raised(traceback=text):
            return text
        case Died(stack=stack):
            return stack
        case Hung(stack=stack):
            return stack or "(it did not answer the request for its stack)"
        case _:
            return ""
