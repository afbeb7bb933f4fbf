"""Ranks started on an emulated cluster: what they are told, what is shown, how all of it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from lightning_dear.emulation import (
    EmulatedCluster,
    remove_stale_namespaces,
    run_on_cluster,
)
from lightning_dear.emulation.cluster import NAMESPACES, processes_in

pytestmark = pytest.mark.netns

TELL = """
import os, sys
names = ("RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK MASTER_ADDR"
         " MASTER_PORT GLOO_SOCKET_IFNAME LIGHTNING_DEAR_EMULATED_HOST GIVEN").split()
address = os.popen("ip -4 -o address show dev eth0").read().split()[3]
with open(f"{sys.argv[1]}/{os.environ['RANK']}", "w") as file:
    print(*(os.environ[name] for name in names), address, file=file)
"""

BY_RANK = """
import os, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
{action}
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmulatedCluster]:
    with EmulatedCluster(num_hosts=2, rate_mbit=None) as entered:
        yield entered


def _python(program: str, *arguments: str) -> list[str]:
    return [sys.executable, "-S", "-c", program, *arguments]


def _by_rank(action: str) -> list[str]:
    return _python(BY_RANK.format(action=action))


def test_ranks_are_told_what_torchrun_tells_them(cluster: EmulatedCluster, tmp_path: Path) -> None:
    code = run_on_cluster(
        cluster, _python(TELL, str(tmp_path)), ranks_per_host=2, env={"GIVEN": "yes"}
    )
    assert code == 0
    told = [(tmp_path / str(rank)).read_text().split() for rank in range(4)]
    assert told == [
        f"{rank} {rank % 2} 4 2 {rank // 2} {rank // 2} 10.0.0.1 29500 eth0 {rank // 2} yes"
        f" 10.0.0.{rank // 2 + 1}/24".split()
        for rank in range(4)
    ]


def test_only_rank_0_is_heard_while_all_is_well(
    cluster: EmulatedCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    say = "print(f'out {rank}'); print(f'err {rank}', file=sys.stderr)"
    assert run_on_cluster(cluster, _by_rank(say)) == 0
    assert capfd.readouterr() == ("out 0\n", "err 0\n")


def test_a_failing_rank_ends_all_and_shows_the_end_of_its_output(
    cluster: EmulatedCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    fail = "print('\\n'.join(f'line {i}' for i in range(10**5)));"
    start_s = time.monotonic()
    code = run_on_cluster(cluster, _by_rank(f"if rank: {fail} sys.exit(7)\ntime.sleep(2)"))
    assert code == 7
    assert time.monotonic() - start_s < 20
    shown = capfd.readouterr().err.splitlines()
    assert shown[0] == "Rank 1 exited with code 7: ending all ranks."
    assert shown[-1] == "[rank 1] line 99999"
    assert len(shown) < 100


def test_a_killed_rank_is_named_with_its_signal(
    cluster: EmulatedCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_on_cluster(cluster, _by_rank("os.kill(os.getpid(), rank and 11)")) == 128 + 11
    assert "Rank 1 was killed by SIGSEGV" in capfd.readouterr().err


def test_ranks_that_ignore_the_failure_are_killed_with_what_they_started(
    cluster: EmulatedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_dear.emulation.launch._GRACE_S", 0.2)
    # The grandchild has a session of its own, so no signal to its parent's group reaches it.
    stay = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if rank: sys.exit(3)\n"
        "subprocess.Popen(['sleep', '600'], start_new_session=True); time.sleep(600)"
    )
    assert run_on_cluster(cluster, _by_rank(stay)) == 3
    assert processes_in(host.namespace for host in cluster.hosts) == []


RUN = """
import sys
from lightning_dear.emulation import EmulatedCluster, run_on_cluster
with EmulatedCluster(num_hosts=2, rate_mbit=None) as cluster:
    try:
        run_on_cluster(cluster, [sys.executable, "-S", "-u", "-c", sys.argv[1]])
    except KeyboardInterrupt:
        print("interrupted")
"""

WAIT = """
import os, time
try:
    print(os.environ["RANK"], os.getpid(), flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("rank 0 heard it", flush=True)
"""


def _until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.02)


def _runs(pid: str) -> bool:
    stat = Path("/proc", pid, "stat")
    # An orphan's entry stays where nobody reaps orphans.
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_nothing_is_left_after_ctrl_c() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", RUN, WAIT],
        stdout=subprocess.PIPE,
        text=True,
        # Whoever runs the tests in the background makes their processes ignore Ctrl-C.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None
        rank, pid = process.stdout.readline().split()
        assert rank == "0"
        assert _runs(pid)
        prefix = f"dear-{process.pid}-0-"
        assert len(list(NAMESPACES.glob(f"{prefix}*"))) == 3
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "rank 0 heard it\ninterrupted\n"
    _until(lambda: not list(NAMESPACES.glob(f"{prefix}*")))
    assert not _runs(pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_their_parent_though_nobody_ends_them(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", RUN, WAIT], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        names = [path.name for path in NAMESPACES.glob(f"dear-{process.pid}-0-*")]
        _until(lambda: len(processes_in(names)) == 2)  # rank 1 may be slower to start
        process.send_signal(number)
        process.wait()
        try:
            _until(lambda: not any(_runs(str(one)) for one in processes_in(names)))
        finally:
            assert set(names) <= set(remove_stale_namespaces())


def test_a_cluster_must_be_entered_and_have_ranks(cluster: EmulatedCluster) -> None:
    with pytest.raises(RuntimeError, match="The cluster is not entered"):
        run_on_cluster(EmulatedCluster(2, None), ["true"])
    with pytest.raises(ValueError, match="ranks_per_host=0 is not valid. Choose 1 or more"):
        run_on_cluster(cluster, ["true"], ranks_per_host=0)
