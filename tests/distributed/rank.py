"""One rank: the process that the fork server forks for each rank of a call, or of several."""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import functools
import gc
import importlib
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any
from unittest import mock

from tests.distributed.calls import Raised, RankCall, Returned

DUMP_SIGNAL = signal.SIGRTMIN + 3
"""Makes a rank write its Python stacks to its stack file. Not SIGUSR1, which Lightning uses."""

RANKS_A_HOST = "TESTS_RANKS_A_HOST"
"""Variable that says how many ranks pretend to share a host, in every test; unset: all do."""

STAGED = "TESTS_STAGED"
"""Variable that is set if all messages travel as between devices and gloo, in every test."""

BODY = "__ranks_body__"
"""Attribute under which `harness.distributed` keeps the function that the ranks run."""

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when process `parent` ends, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def stack_file(directory: Path, rank: int) -> Path:
    """Where rank `rank` writes its stacks on `DUMP_SIGNAL` and on fatal signals."""
    return directory / f"rank{rank}.stack"


def run_rank(link: Connection) -> None:
    """Run a call that comes through `link`, and others while ranks are kept. Blocks.

    A call is a tuple of the `RankCall`, this process's rank, a free port for `MASTER_PORT` and a
    scratch directory that the ranks share; two file descriptors for its output come behind it.
    The outcome goes back, and then whoever returned waits until the call is over, when it is told
    whether it is kept. If so, it says whether it is as it was, and waits for the next call.
    """
    import numpy
    import torch

    torch.set_num_threads(1)
    settings = _settings()
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    while True:
        call, rank, port, directory = link.recv()
        for standard in (1, 2):
            output = recv_handle(link)
            os.dup2(output, standard)
            os.close(output)
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        numpy.random.set_state(states[2])
        with warnings.catch_warnings():
            outcome = _run(call, rank, port, directory)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        link.send(outcome)
        # A rank that leaves early closes sockets on which its peers may still be reading.
        if not ((call.linger or isinstance(outcome, Returned)) and link.recv()):
            return
        _end_process_groups()
        is_as_it_was = _settings() == settings
        link.send(is_as_it_was)
        if not is_as_it_was:
            # A thread that was left behind would disturb whatever runs next.
            return


def _run(call: RankCall, rank: int, port: int, directory: Path) -> Returned | Raised:
    try:
        _prepare(call, rank, port, directory)
        if call.init_process_group:
            _init_process_group(call, rank, directory)
        args, kwargs = pickle.loads(call.arguments)
        pretended = os.environ.get(RANKS_A_HOST)
        with (
            on_hosts(int(pretended)) if pretended else nullcontext(),
            staged() if os.environ.get(STAGED) else nullcontext(),
        ):
            returned = _find(call)(*args, **kwargs)
        return Returned(pickle.dumps(returned, pickle.HIGHEST_PROTOCOL))
    except BaseException as error:  # also SystemExit: a test that calls sys.exit() has failed
        return Raised(time.monotonic(), repr(error), traceback.format_exc())


@contextmanager
def on_hosts(ranks_a_host: int) -> Iterator[None]:
    """As if so many ranks shared a host, for whoever makes collectives here."""
    host = f"host {int(os.environ['RANK']) // ranks_a_host}", ""
    with mock.patch("lightning_dear.collectives.factory._host", return_value=host):
        yield


@contextmanager
def staged() -> Iterator[None]:
    """As if parameters lay on a device: collectives made here copy all that they send."""
    with mock.patch("lightning_dear.collectives.factory._is_staged") as is_staged:
        is_staged.side_effect = lambda backend, device: backend == "gloo"
        yield


def _settings() -> list[object]:
    """What a call may change of a process that a later call would notice."""
    import torch

    return [
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        sorted(thread.name for thread in threading.enumerate()),
        *(signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)),
    ]


def _end_process_groups() -> None:
    import torch.distributed as dist

    gc.collect()
    ours = sys.modules.get("lightning_dear.collectives.factory")
    if ours is not None:
        ours.forget_process_groups()
    if dist.is_initialized():
        dist.destroy_process_group()


def _prepare(call: RankCall, rank: int, port: int, directory: Path) -> None:
    stacks = stack_file(directory, rank).open("w")
    faulthandler.enable(stacks, all_threads=True)
    faulthandler.register(DUMP_SIGNAL, stacks, all_threads=True)
    os.environ.clear()
    os.environ.update(_environment(call, rank, port) | call.env)
    os.chdir(call.cwd)
    sys.path[:] = call.sys_path
    if call.hosts is not None:
        _enter(call.hosts[rank].namespace)


def _enter(namespace: str) -> None:
    """Moves this thread, and what it starts from now on, into a network namespace.

    Before it opens sockets: those that are open stay where they are.
    """
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        # os.setns exists from Python 3.12 on.
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    finally:
        os.close(descriptor)


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
    import torch.distributed as dist

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
