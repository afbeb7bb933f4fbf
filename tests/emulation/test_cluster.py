"""The emulated cluster: rates, byte counts, ranks inside it, and that nothing is left behind."""

from __future__ import annotations

import os
import pickle
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_dear.emulation import (
    AS_OWN_ROOT,
    EmulatedCluster,
    EmulatedHost,
    EmulationUnavailable,
    remove_stale_namespaces,
    why_unavailable,
)
from lightning_dear.emulation.cluster import processes_in
from tests.distributed.harness import run_ranks

_PROGRAM = str(Path(__file__).with_name("bulk_transfer.py"))


def _transfer(
    source: EmulatedHost, target: EmulatedHost, num_bytes: int, port: int = 5001
) -> tuple[float, float]:
    """Send bytes from one host to another; return when it began and when all had come, in s."""
    python = [sys.executable, "-S", _PROGRAM]
    address = [target.address, str(port)]
    receive = target.command([*python, "receive", *address])
    with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "listening\n"
        send = source.command([*python, "send", *address, str(num_bytes)])
        start = subprocess.run(send, capture_output=True, text=True, check=True, timeout=60).stdout
        received, end = receiver.stdout.readline().split()
    assert int(received) == num_bytes
    return float(start), float(end)


def _namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in listed.stdout.splitlines()}


def _interfaces() -> set[str]:
    return set(os.listdir("/sys/class/net"))


@pytest.mark.netns
@pytest.mark.parametrize("most", [None, 8192, 512 << 10])
def test_sockets_hold_what_the_kernel_lets_them_or_the_option_says(most: int | None) -> None:
    paths = [Path(f"/proc/sys/net/ipv4/tcp_{what}mem") for what in "wr"]
    own = [path.read_text().split() for path in paths]
    with EmulatedCluster(num_hosts=1, rate_mbit=1, socket_buffer_bytes=most) as cluster:
        show = cluster.hosts[0].command(["cat", *map(str, paths)])
        said = subprocess.run(show, capture_output=True, text=True, check=True).stdout
        rig = cluster.describe(4)
    limits = [line.split() for line in said.splitlines()]
    assert (
        limits == own if most is None else [one[2] for one in limits] == [f"{most}", f"{2 * most}"]
    )
    assert own == [path.read_text().split() for path in paths]
    sizes = [int(one[2]) / 2**20 for one in limits]
    whose = "the kernel's" if most is None else "capped"
    assert rig == (
        f"1 emulated hosts x 4 ranks, 1 Mb/s, cubic, socket buffers {whose} ({sizes[0]:g} MiB out,"
        f" {sizes[1]:g} in), MTU 9000, port queue 16 MiB"
    )


@pytest.mark.alone
@pytest.mark.netns
def test_bytes_of_a_known_transfer_are_counted() -> None:
    num_bytes = 16 << 20
    counted = []
    with EmulatedCluster(num_hosts=3, rate_mbit=None) as cluster:
        sender, bystander, receiver = cluster.hosts
        # The least of some: on a busy machine TCP sends some packets again.
        for port in range(5001, 5006):
            sent, received = sender.wire_bytes()[0], receiver.wire_bytes()[1]
            _transfer(sender, receiver, num_bytes, port)
            counted.append((sender.wire_bytes()[0] - sent, receiver.wire_bytes()[1] - received))
        others = sum(bystander.wire_bytes())
    sent, received = min(counted)
    assert num_bytes < sent < 1.03 * num_bytes
    assert received == pytest.approx(sent, rel=0.01)
    assert others < 10_000


@pytest.mark.alone
@pytest.mark.netns
@pytest.mark.parametrize("rate_mbit", [100, 1000])
def test_bulk_transfer_runs_at_the_shaped_rate(rate_mbit: int) -> None:
    num_bytes = int(0.4 * rate_mbit * 1e6 / 8)
    with EmulatedCluster(num_hosts=2, rate_mbit=rate_mbit) as cluster:
        # The fastest of some: a busy machine makes a transfer slower and never faster.
        seconds = min(_seconds_of(cluster, [(0, 1)], num_bytes) for _ in range(4))
    assert num_bytes * 8 / seconds / 1e6 == pytest.approx(rate_mbit, rel=0.15)


@pytest.mark.netns
@pytest.mark.parametrize("flows", [[(0, 2), (1, 2)], [(2, 0), (2, 1)]], ids=["in", "out"])
def test_flows_share_the_link_of_the_host_where_they_meet(flows: list[tuple[int, int]]) -> None:
    with EmulatedCluster(num_hosts=3, rate_mbit=100) as cluster:
        assert _seconds_of(cluster, flows, 10_000_000) > 0.9 * 1.6


@pytest.mark.alone
@pytest.mark.netns
def test_directions_of_a_link_do_not_share_its_rate() -> None:
    with EmulatedCluster(num_hosts=2, rate_mbit=100) as cluster:
        assert 0.9 < _seconds_of(cluster, [(0, 1), (1, 0)], 12_500_000) < 1.6


def _seconds_of(
    cluster: EmulatedCluster, flows: Sequence[tuple[int, int]], num_bytes: int
) -> float:
    """Seconds from the start of the first of several flows to the end of the last."""
    with ThreadPoolExecutor() as threads:
        transfers = [
            threads.submit(_transfer, cluster.hosts[source], cluster.hosts[target], num_bytes, port)
            for port, (source, target) in enumerate(flows, start=5001)
        ]
        starts, ends = zip(*(transfer.result() for transfer in transfers), strict=True)
    return max(ends) - min(starts)


@pytest.mark.netns
def test_nothing_is_left_after_an_exception() -> None:
    namespaces, interfaces = _namespaces(), _interfaces()
    cluster = EmulatedCluster(num_hosts=2, rate_mbit=100)
    with pytest.raises(RuntimeError, match="3 namespaces"), cluster:
        raise RuntimeError(f"{len(_namespaces() - namespaces)} namespaces")
    assert _namespaces() == namespaces
    assert _interfaces() == interfaces
    assert cluster.hosts == ()


@pytest.mark.netns
def test_nothing_is_left_when_the_kernel_refuses_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    namespaces = _namespaces()
    monkeypatch.setattr("lightning_dear.emulation.cluster._TBF_BURST", "nonsense")
    with (
        pytest.raises(EmulationUnavailable, match="refused `tc .*nonsense"),
        EmulatedCluster(num_hosts=2, rate_mbit=100),
    ):
        pass
    assert _namespaces() == namespaces


@pytest.mark.netns
def test_congestion_control_is_the_one_asked_for() -> None:
    # What both ends of a connection use, within the host by both of its addresses.
    program = """if True:
        import socket
        for address in ("10.0.0.1", "127.0.0.1"):
            with socket.create_server((address, 0)) as server:
                with socket.create_connection(server.getsockname()) as caller:
                    with server.accept()[0] as called:
                        for one in (caller, called):
                            name = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                            print(name.rstrip(b"\\0").decode())
    """

    def used(name: str) -> tuple[set[str], str]:
        with EmulatedCluster(1, None, congestion_control=name) as cluster:
            run = partial(subprocess.run, capture_output=True, text=True, check=True)
            within = run(cluster.hosts[0].command([sys.executable, "-c", program])).stdout
            routes = run(cluster.hosts[0].command(["ip", "route"])).stdout
            assert cluster.describe(1).split(", ")[2] in within
            assert ", not shaped, " in f", {cluster.describe(1)}"
            return set(within.split()), routes

    for name in ("cubic", "reno"):
        within, routes = used(name)
        assert within == {name}
        assert f"congctl {name}" in routes
    namespaces = _namespaces()
    with pytest.raises(EmulationUnavailable, match="congestion_control='nonsense' was not set"):
        used("nonsense")
    assert _namespaces() == namespaces


@pytest.mark.netns
def test_namespaces_of_a_killed_process_are_removed_and_those_of_a_live_one_kept() -> None:
    namespaces = _namespaces()
    program = (
        "import time; from lightning_dear.emulation import EmulatedCluster\n"
        "cluster = EmulatedCluster(num_hosts=1, rate_mbit=None)\n"
        "with cluster:\n"
        "    print('up', flush=True); time.sleep(600)\n"
    )
    with (
        EmulatedCluster(num_hosts=1, rate_mbit=None) as cluster,
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
        stale = {f"dear-{process.pid}-0-host0", f"dear-{process.pid}-0-switch"}
        assert stale < _namespaces()
        namespace = f"dear-{process.pid}-0-host0"
        lost = subprocess.Popen(["ip", "netns", "exec", namespace, "sleep", "600"])
        while lost.pid not in processes_in([namespace]):
            assert lost.poll() is None
        assert stale <= set(remove_stale_namespaces())
        assert lost.wait(timeout=5) == -signal.SIGKILL
        assert cluster.hosts[0].namespace in _namespaces()
    assert _namespaces() == namespaces


@pytest.mark.netns
def test_two_clusters_do_not_meet() -> None:
    with (
        EmulatedCluster(num_hosts=1, rate_mbit=None) as first,
        EmulatedCluster(num_hosts=2, rate_mbit=None) as second,
    ):
        _transfer(second.hosts[0], second.hosts[1], 1 << 20)
        assert sum(first.hosts[0].wire_bytes()) < 10_000


def _all_reduce(num_elements: int) -> tuple[float, str, list[str]]:
    tensor = torch.full((num_elements,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor)
    return tensor[-1].item(), os.environ["MASTER_ADDR"], sorted(_own_interfaces())


def _own_interfaces() -> list[str]:
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return [line.split(":")[0].strip() for line in lines]


@pytest.mark.alone
@pytest.mark.netns
def test_ranks_reduce_over_the_emulated_links() -> None:
    num_elements = 1 << 20
    with EmulatedCluster(num_hosts=2, rate_mbit=1000) as cluster:
        results = run_ranks(_all_reduce, 2, num_elements, hosts=cluster.hosts)
        traffic = [host.wire_bytes() for host in cluster.hosts]
    assert results == [(3.0, "10.0.0.1", ["eth0", "lo"])] * 2
    for sent, received in traffic:
        assert sent == pytest.approx(num_elements * 4, rel=0.03)
        assert received == pytest.approx(num_elements * 4, rel=0.03)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_hosts": 0, "rate_mbit": 1}, "num_hosts=0 is not valid. Choose 1 to 200"),
        ({"num_hosts": 1, "rate_mbit": 0}, "rate_mbit=0 is not valid"),
        ({"num_hosts": 1, "rate_mbit": 1, "mtu": 10}, "mtu must be 576 to 65535"),
        (
            {"num_hosts": 1, "rate_mbit": 1, "socket_buffer_bytes": -1},
            "socket_buffer_bytes=-1 is not valid. .* 4096 to .*, or None for the kernel's own",
        ),
        ({"num_hosts": 1, "rate_mbit": 1, "delay_ms": -1}, "delay_ms=-1 .* 0 to 10000"),
        ({"num_hosts": 1, "rate_mbit": 1, "delay_ms": float("nan")}, "delay_ms=nan is not valid"),
        ({"num_hosts": 1, "rate_mbit": 1, "loss": 1}, "loss=1 .* 0.01 means 1 %"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EmulatedCluster(**arguments)


def test_missing_root_tool_and_system_are_each_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    assert why_unavailable() == "an emulated cluster needs tc, not found: install iproute2"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["my script.py", "--fast"])
    with pytest.raises(EmulationUnavailable, match="needs root: use sudo, or ") as raised:
        EmulatedCluster(num_hosts=1, rate_mbit=None).__enter__()
    # The command that dear-bench runs, with this program.
    again = shlex.split(str(raised.value).partition(" by itself: ")[2])
    assert again == [*AS_OWN_ROOT, sys.executable, "my script.py", "--fast"]
    monkeypatch.setattr(sys, "platform", "darwin")
    assert (why_unavailable() or "").startswith("an emulated cluster needs Linux, not darwin: run")


def test_host_is_a_plain_record() -> None:
    host = EmulatedHost(0, "dear-1-0-host0", "10.0.0.1", "eth0")
    assert pickle.loads(pickle.dumps(host)) == host
    assert host.command(["true"]) == ["ip", "netns", "exec", "dear-1-0-host0", "true"]
