"""Starts a process for each rank on an emulated cluster's hosts, as torchrun does on real ones."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO

from lightning_dear.emulation.cluster import EmulatedCluster, EmulatedHost

HOST_VARIABLE = "LIGHTNING_DEAR_EMULATED_HOST"
"""Variable that each rank on an emulated cluster has, with the number of its host."""

RIG_VARIABLE = "LIGHTNING_DEAR_EMULATED_RIG"
"""Variable that each rank on an emulated cluster has, with the text that `emulated_rig` returns."""

_MASTER_PORT = 29500  # every cluster is a network of its own, so no port is taken
_POLL_S = 0.05
_GRACE_S = 5.0
_TAIL_BYTES = 64 << 10
_TAIL_LINES = 40


def emulated_rig() -> str:
    """Return the line on hosts and links that heads tables measured here; empty on real hosts."""
    return os.environ.get(RIG_VARIABLE, "")


def run_on_cluster(
    cluster: EmulatedCluster,
    argv: Sequence[str],
    *,
    ranks_per_host: int = 1,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
) -> int:
    """Run a command once for each rank, spread over the hosts. Blocks until all ranks have ended.

    Ranks find each other through the variables that torchrun sets (`RANK`, `LOCAL_RANK`,
    `WORLD_SIZE`, `MASTER_ADDR`, ...), and `GLOO_SOCKET_IFNAME`. Rank 0 writes to this process's
    stdout and stderr. The last lines of another rank are printed if it fails. When a rank fails,
    the others have 5 s to end, and then all processes on the cluster are killed. A
    KeyboardInterrupt sends SIGINT, or the signal whose exit code is its argument, to all ranks,
    with the same 5 s. When the calling thread is killed, the kernel kills the ranks.

    Args:
        cluster: A cluster that is entered.
        argv: Program and arguments, the same on every rank.
        ranks_per_host: Number of ranks on each host; rank r runs on host r // ranks_per_host.
        env: Variables for all ranks; they override those of this process and those set here.
        cwd: Folder in which the ranks start. None means this process's folder.

    Returns:
        0 if all ranks ended with 0, otherwise the exit code of the first failed rank, or 128 plus
        the number of the signal that killed it.

    Raises:
        RuntimeError: If the cluster is not entered.
        ValueError: If `ranks_per_host` is not positive.
        KeyboardInterrupt: If this process was interrupted; raised when all ranks have ended.
    """
    if not cluster.hosts:
        raise RuntimeError("The cluster is not entered. Use: with EmulatedCluster(...) as cluster")
    if ranks_per_host < 1:
        raise ValueError(f"ranks_per_host={ranks_per_host} is not valid. Choose 1 or more.")
    variables = {RIG_VARIABLE: cluster.describe(ranks_per_host), **(env or {})}
    ranks: list[_Rank] = []
    with ExitStack() as outputs:
        try:
            for rank in range(len(cluster.hosts) * ranks_per_host):
                told = {**_variables(cluster.hosts, rank, ranks_per_host), **variables}
                # The kernel kills the rank when this process ends, even if that is by SIGKILL.
                bound = ["setpriv", "--pdeathsig", "KILL", *argv]
                command = cluster.hosts[rank // ranks_per_host].command(bound)
                output = outputs.enter_context(TemporaryFile()) if rank else None
                ranks.append(_Rank(rank, _started(command, told, cwd, output), output))
            code = _watch(ranks)
        except KeyboardInterrupt as interrupt:
            _interrupt(ranks, interrupt.args[0] - 128 if interrupt.args else signal.SIGINT)
            raise
        finally:
            cluster.end_processes()
            for one in ranks:
                one.process.wait()
        for one in ranks:
            one.print_tail()
    return code


def _started(
    command: Sequence[str], variables: Mapping[str, str], cwd: str | None, output: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    # Each rank has its own session, so that Ctrl-C reaches only this process, which passes it on.
    env = {**os.environ, **variables}
    return subprocess.Popen(
        command, env=env, cwd=cwd, stdout=output, stderr=output, start_new_session=True
    )


@dataclass
class _Rank:
    """A started rank. None as its output means this process's stdout and stderr."""

    number: int
    process: subprocess.Popen[bytes]
    output: IO[bytes] | None

    def ending(self) -> int:
        """Print how this rank failed; return the exit code of the whole run."""
        code = self.process.returncode
        killed = f"was killed by {signal.Signals(-code).name}" if code < 0 else ""
        how = killed or f"exited with code {code}"
        print(f"Rank {self.number} {how}: ending all ranks.", file=sys.stderr, flush=True)
        return int(code if code > 0 else 128 - code)

    def print_tail(self) -> None:
        """Print the last lines of this rank's output, if it failed and has an output file."""
        if self.output is not None and self.process.returncode:
            self.output.seek(max(0, self.output.seek(0, os.SEEK_END) - _TAIL_BYTES))
            for line in self.output.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]:
                print(f"[rank {self.number}] {line}", file=sys.stderr, flush=True)


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
        # From this variable torch and Lightning know that a launcher has started the ranks.
        "TORCHELASTIC_RUN_ID": "emulated",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", num_threads),
        HOST_VARIABLE: node,
    }
    return {name: str(value) for name, value in values.items()}


def _watch(ranks: Sequence[_Rank]) -> int:
    """Block until all ranks have ended, or 5 s after one has failed; return the exit code."""
    code, end_s, is_running = 0, float("inf"), True
    while is_running and time.monotonic() < end_s:
        time.sleep(_POLL_S)
        is_running = _is_running(ranks)
        if (failed := [rank for rank in ranks if rank.process.returncode]) and not code:
            code, end_s = failed[0].ending(), time.monotonic() + _GRACE_S
    return code


def _is_running(ranks: Sequence[_Rank]) -> bool:
    """Whether a rank still runs. Polls every rank, so that each has its return code."""
    return None in [rank.process.poll() for rank in ranks]


def _interrupt(ranks: Sequence[_Rank], number: int) -> None:
    # A second Ctrl-C ends the 5 s early.
    with suppress(KeyboardInterrupt):
        for rank in ranks:
            rank.process.send_signal(number)
        deadline_s = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline_s and _is_running(ranks):
            time.sleep(_POLL_S)
