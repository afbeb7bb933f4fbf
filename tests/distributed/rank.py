"""One rank: the process that the fork server forks for each rank of a call."""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import functools
import importlib
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.distributed.calls import Raised, RankCall, Returned

DUMP_SIGNAL = signal.SIGRTMIN + 3
"""Makes a rank write its Python stacks to its stack file. Not SIGUSR1, which Lightning uses."""

BODY = "__ranks_body__"
"""Attribute under which `harness.distributed` keeps the function that the ranks run."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when process `parent` ends, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def stack_file(directory: Path, rank: int) -> Path:
    """Where rank `rank` writes its stacks on `DUMP_SIGNAL` and on fatal signals."""
    return directory / f"rank{rank}.stack"


def run_rank(
    call: RankCall, rank: int, port: int, directory: Path, report: Connection, release: int
) -> None:
    """Run the call as rank `rank`, report its outcome, wait until the call is over.

    Args:
        call: What to run.
        rank: This process's rank.
        port: A free port, for `MASTER_PORT`.
        directory: Scratch directory shared by the ranks of the call.
        report: Where the outcome goes.
        release: File descriptor that reaches its end when the call is over.
    """
    try:
        _prepare(call, rank, port, directory)
        if call.init_process_group:
            _init_process_group(call, rank, directory)
        args, kwargs = pickle.loads(call.arguments)
        outcome: Returned | Raised = Returned(
            pickle.dumps(_find(call)(*args, **kwargs), pickle.HIGHEST_PROTOCOL)
        )
    except BaseException as error:  # also SystemExit: a test that calls sys.exit() has failed
        outcome = Raised(time.monotonic(), repr(error), traceback.format_exc())
    report.send(outcome)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # A rank that leaves early closes sockets on which its peers may still be reading.
    if call.linger or isinstance(outcome, Returned):
        os.read(release, 1)


def _prepare(call: RankCall, rank: int, port: int, directory: Path) -> None:
    stacks = stack_file(directory, rank).open("w")
    faulthandler.enable(stacks, all_threads=True)
    faulthandler.register(DUMP_SIGNAL, stacks, all_threads=True)
    os.environ.clear()
    os.environ.update(_environment(call, rank, port) | call.env)
    os.chdir(call.cwd)
    sys.path[:] = call.sys_path
    if call.hosts is not None:
        call.hosts[rank].enter()


def _environment(call: RankCall, rank: int, port: int) -> dict[str, str]:
    host = call.hosts[rank] if call.hosts else None
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(call.world_size),
        "LOCAL_WORLD_SIZE": str(call.world_size),
        "MASTER_ADDR": call.hosts[0].address if call.hosts else "127.0.0.1",
        "MASTER_PORT": str(port),
        # Without it gloo resolves the machine's own name, which may be slow or wrong.
        "GLOO_SOCKET_IFNAME": host.interface if host else "lo",
    }


def _init_process_group(call: RankCall, rank: int, directory: Path) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(directory / "store"), call.world_size),
        rank=rank,
        world_size=call.world_size,
        # Longer than the harness waits: a hang is the harness's to report, with stacks.
        timeout=datetime.timedelta(seconds=call.timeout_s + 60),
    )


def _find(call: RankCall) -> Callable[..., Any]:
    function = functools.reduce(
        getattr, call.qualname.split("."), importlib.import_module(call.module)
    )
    return getattr(function, BODY, function)
