"""Start one process per rank on the hosts of an emulated cluster, as torchrun does on real ones."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

from lightning_dear.emulation.cluster import EmulatedCluster
from lightning_dear.emulation.host import EmulatedHost

HOST_VARIABLE = "LIGHTNING_DEAR_EMULATED_HOST"
"""Set in every rank to the number of its host: tells that it runs inside an emulated cluster."""

RIG_VARIABLE = "LIGHTNING_DEAR_EMULATED_RIG"
"""Set in every rank to what `emulated_rig` returns."""

TIMED_OUT = 124
"""Exit code when the time was over; what the program `timeout` returns."""

_MASTER_PORT = 29500  # every cluster is a network of its own, so no port is taken
_POLL_S = 0.05
_GRACE_S = 5.0
_TAIL_BYTES = 64 << 10
_TAIL_LINES = 40


def emulated_rig() -> str:
    """Return the line that heads every table measured on emulated hosts; on others it is empty."""
    return os.environ.get(RIG_VARIABLE, "")


def run_on_cluster(
    cluster: EmulatedCluster,
    argv: Sequence[str],
    *,
    ranks_per_host: int = 1,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    timeout_s: float | None = None,
    user: tuple[int, int] | None = None,
) -> int:
    """Run a command once per rank, spread over the hosts; block until all have ended.

    Ranks find each other through the variables that torchrun sets (`RANK`, `LOCAL_RANK`,
    `WORLD_SIZE`, `MASTER_ADDR`, ...), and `GLOO_SOCKET_IFNAME`. Rank 0 writes to this process's
    stdout and stderr. What the others write is kept, and its end is printed if the run fails.
    When a rank fails, the others have 5 s to say so and to end, then they are killed, with
    everything else that runs on the cluster. Ctrl-C goes to all ranks, with the same 5 s (another
    signal, if a KeyboardInterrupt names its exit code). When the thread that called this is killed,
    the kernel kills the ranks.

    Args:
        cluster: A cluster that is entered.
        argv: Program and arguments, the same on every rank.
        ranks_per_host: Ranks on each host; rank r runs on host r // ranks_per_host.
        env: Variables for all ranks, over those of this process and those set here.
        cwd: Folder in which the ranks start; None: this process's.
        timeout_s: Seconds until everything is killed; None: no limit.
        user: Numbers of the user and of the group as whom ranks run; None: as this process.

    Returns:
        0 if all ranks ended with 0; else that of the first rank to fail, 128 + the signal's
        number if one killed it; `TIMED_OUT` if the time was over.

    Raises:
        RuntimeError: The cluster is not entered.
        ValueError: `ranks_per_host` is not positive.
        KeyboardInterrupt: After Ctrl-C, when all ranks have ended.
    """
    if not cluster.hosts:
        raise RuntimeError("enter the cluster first: with EmulatedCluster(...) as cluster")
    if ranks_per_host < 1:
        raise ValueError(f"ranks_per_host must be at least 1, not {ranks_per_host}")
    prefix, users_own = _as_user(user)
    rig = {RIG_VARIABLE: cluster.describe(ranks_per_host)}
    command, variables = [*prefix, *argv], {**rig, **users_own, **(env or {})}
    ranks: list[_Rank] = []
    try:
        for rank in range(len(cluster.hosts) * ranks_per_host):
            ranks.append(_start(cluster.hosts, rank, ranks_per_host, command, variables, cwd))
        code = _watch(ranks, timeout_s)
    except KeyboardInterrupt as interrupt:
        _interrupt(ranks, interrupt.args[0] - 128 if interrupt.args else signal.SIGINT)
        raise
    finally:
        cluster.end_processes()
        for one in ranks:
            one.process.wait()
    if code:
        _print_tails(ranks)
    return code


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    output: _Tail | None


@dataclass
class _Tail:
    """Reads a pipe to its end on a thread of its own, and keeps the last 64 KiB."""

    pipe: IO[bytes]
    text: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self.pipe:
            while chunk := os.read(self.pipe.fileno(), 1 << 16):
                self.text += chunk
                del self.text[:-_TAIL_BYTES]

    def lines(self) -> list[str]:
        self._thread.join(timeout=1)
        return self.text.decode(errors="replace").splitlines()[-_TAIL_LINES:]


def _as_user(user: tuple[int, int] | None) -> tuple[list[str], dict[str, str]]:
    """What to put before a rank's command on its host, and the variables of its user."""
    # The janitor ends ranks too, but it may be killed together with this process.
    prefix = ["setpriv", "--pdeathsig", "KILL"]
    if user is None:
        return prefix, {}
    prefix += ["--reuid", str(user[0]), "--regid", str(user[1]), "--init-groups"]
    known = pwd.getpwuid(user[0])
    return prefix, {"HOME": known.pw_dir, "USER": known.pw_name, "LOGNAME": known.pw_name}


def _start(
    hosts: Sequence[EmulatedHost],
    rank: int,
    ranks_per_host: int,
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str | None,
) -> _Rank:
    host = hosts[rank // ranks_per_host]
    process = subprocess.Popen(
        host.command(argv),
        env={**os.environ, **_variables(hosts, rank, ranks_per_host), **env},
        cwd=cwd,
        stdout=subprocess.PIPE if rank else None,
        stderr=subprocess.STDOUT if rank else None,
        # Ctrl-C then reaches this process alone, which hands it on to each rank once.
        start_new_session=True,
    )
    return _Rank(rank, process, _Tail(process.stdout) if process.stdout else None)


def _variables(hosts: Sequence[EmulatedHost], rank: int, ranks_per_host: int) -> dict[str, str]:
    node, local_rank = divmod(rank, ranks_per_host)
    world_size = len(hosts) * ranks_per_host
    num_threads = max(1, (os.cpu_count() or 1) // world_size)
    values = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": ranks_per_host,
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": len(hosts),
        "NODE_RANK": node,
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": _MASTER_PORT,
        "GLOO_SOCKET_IFNAME": hosts[node].interface,
        # By this name torch and Lightning know that somebody else has started the ranks.
        "TORCHELASTIC_RUN_ID": "emulated",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", num_threads),
        HOST_VARIABLE: node,
    }
    return {name: str(value) for name, value in values.items()}


def _watch(ranks: Sequence[_Rank], timeout_s: float | None) -> int:
    """Wait until all have ended, one has failed and its grace is over, or the time is over."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    first_code = 0
    end = deadline
    while _num_running(ranks):
        if not first_code and (failed := _failed(ranks)):
            first_code = _exit_code(failed[0])
            grace_end = time.monotonic() + _GRACE_S
            end = grace_end if end is None else min(end, grace_end)
        if end is not None and time.monotonic() >= end:
            break
        time.sleep(_POLL_S)
    failed = _failed(ranks)
    if first_code or failed:
        return first_code or _exit_code(failed[0])
    if all(one.process.returncode == 0 for one in ranks):
        return 0
    print(f"The ranks have not ended within {timeout_s:g} s: ending them.", file=sys.stderr)
    return TIMED_OUT


def _num_running(ranks: Sequence[_Rank]) -> int:
    return [one.process.poll() for one in ranks].count(None)


def _failed(ranks: Sequence[_Rank]) -> list[_Rank]:
    return [one for one in ranks if one.process.returncode]


def _exit_code(rank: _Rank) -> int:
    code = rank.process.returncode
    how = f"exited with code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
    print(f"Rank {rank.number} {how}: ending all ranks.", file=sys.stderr, flush=True)
    return int(code if code > 0 else 128 - code)


def _interrupt(ranks: Sequence[_Rank], number: int) -> None:
    # A second Ctrl-C ends the grace.
    with suppress(KeyboardInterrupt):
        for one in ranks:
            one.process.send_signal(number)
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline and _num_running(ranks):
            time.sleep(_POLL_S)


def _print_tails(ranks: Sequence[_Rank]) -> None:
    """Print how the output of ranks 1, 2, ... ends; that of rank 0 has been seen."""
    for one in ranks:
        if one.output is not None and one.process.returncode:
            for line in one.output.lines():
                print(f"[rank {one.number}] {line}", file=sys.stderr)
    sys.stderr.flush()
