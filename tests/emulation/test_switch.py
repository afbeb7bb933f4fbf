"""Links with delay and loss: what the switch does in a simulated second, and in a real one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lightning_dear.emulation import (
    EmulatedCluster,
    EmulationUnavailable,
    remove_stale_namespaces,
    run_on_cluster,
    switch,
)
from lightning_dear.emulation.cluster import NAMESPACES, processes_in
from lightning_dear.emulation.switch import Switch, SwitchProcess, mac_address
from tests.emulation.test_cluster import _namespaces, _seconds_of
from tests.emulation.test_launch import RUN, WAIT, _runs, _until

UNTIL = 100
NUM_HOSTS = 4
BROADCAST = b"\xff" * 6


def frame(receiver: int, mark: int = 0, num_bytes: int = 1000) -> bytes:
    address = bytes.fromhex(mac_address(receiver).replace(":", ""))
    return (address + bytes([mark])).ljust(num_bytes, b"\0")


@dataclass
class World:
    """Stands in for the modules `os` and `time`, and for `select`: no real time passes."""

    now_s: float = 5.0
    sent: list[tuple[float, int, bytes]] = field(default_factory=list)
    came: list[tuple[float, int, bytes]] = field(default_factory=list)
    down: int | None = None

    def select(self, devices: list[int], *_: Any) -> tuple[list[int], list[int], list[int]]:
        assert devices == [UNTIL, *range(NUM_HOSTS)]
        wait_s, times = _[-1], [one[0] for one in self.sent]
        if wait_s is None and not times:
            return [UNTIL], [], []
        self.now_s = max(
            self.now_s, min([*times, *([] if wait_s is None else [self.now_s + wait_s])])
        )
        return [one for one in range(NUM_HOSTS) if self._has_sent(one)], [], []

    def _has_sent(self, host: int) -> list[tuple[float, int, bytes]]:
        return [one for one in self.sent if one[1] == host and one[0] <= self.now_s]

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def read(self, device: int, most: int) -> bytes:
        found = self._has_sent(device)
        if not found:
            raise BlockingIOError
        self.sent.remove(found[0])
        return found[0][2]

    def write(self, device: int, data: bytes) -> None:
        if device == self.down:
            raise OSError(5, "Input/output error")
        self.came.append((self.now_s - 5.0, device, data))


Forward = Callable[..., list[tuple[float, int, bytes]]]


@pytest.fixture
def forward(monkeypatch: pytest.MonkeyPatch) -> Forward:
    def run(
        sent: Sequence[tuple[float, int, bytes]], *numbers: float, down: int | None = None
    ) -> list[tuple[float, int, bytes]]:
        world = World(sent=[(5.0 + at_s, *rest) for at_s, *rest in sent], down=down)
        for name in ("os", "time"):
            monkeypatch.setattr(switch, name, world)
        monkeypatch.setattr(switch, "select", world.select)
        Switch(range(NUM_HOSTS), *numbers).run(UNTIL)
        monkeypatch.undo()
        return world.came

    return run


def test_a_frame_takes_its_link_and_the_delay(forward: Forward) -> None:
    ((at_s, host, data),) = forward([(0.0, 0, frame(2, 7))], 1e-4, 0.05, 0.0, 1.0)
    assert (host, data) == (2, frame(2, 7))
    assert 0.15 <= at_s < 0.151


def test_frames_keep_the_rate_and_their_order(forward: Forward) -> None:
    came = forward([(0.0, 0, frame(1, mark)) for mark in range(50)], 1e-5, 0.2, 0.0, 1.0)
    assert [data[6] for _, _, data in came] == list(range(50))
    for number, (at_s, _, _) in enumerate(came, start=1):
        assert 0.2 + number * 0.01 <= at_s < 0.201 + number * 0.01


def test_senders_share_the_receivers_link(forward: Forward) -> None:
    sent = [(0.0, sender, frame(3)) for _ in range(20) for sender in (0, 1)]
    assert 0.05 + 0.39 <= forward(sent, 1e-5, 0.05, 0.0, 1.0)[-1][0] < 0.461


def test_directions_and_pairs_do_not_share(forward: Forward) -> None:
    pairs = [(0, 1), (1, 0), (2, 3), (3, 2)]
    sent = [(0.0, sender, frame(receiver)) for _ in range(20) for sender, receiver in pairs]
    assert 0.25 <= forward(sent, 1e-5, 0.05, 0.0, 1.0)[-1][0] < 0.251


def test_nothing_waits_for_frames_that_are_still_at_their_sender(forward: Forward) -> None:
    sent = [*((0.0, 0, frame(2)) for _ in range(50)), (0.1, 1, frame(2, 7))]
    at_s = next(at_s for at_s, _, data in forward(sent, 1e-5, 0.05, 0.0, 1.0) if data[6] == 7)
    assert at_s < 0.1 + 0.01 + 0.05 + 0.011


def test_a_full_queue_drops(forward: Forward) -> None:
    sent = [(0.0, 0, frame(1, mark)) for mark in range(100)]
    came = forward(sent, 1e-5, 0.05, 0.0, 0.0951)
    assert [data[6] for _, _, data in came] == list(range(10))
    # At the receiver, where three send at a third of what would fill their own links' queues.
    came = forward([(0.0, mark % 3, frame(3, mark)) for mark in range(30)], 1e-5, 0.05, 0.0, 0.0951)
    assert 10 < len(came) < 25


def test_loss_is_the_share_and_the_same_in_each_run(forward: Forward) -> None:
    sent = [(0.0, sender, frame(3)) for _ in range(1000) for sender in (0, 1)]
    sent = [
        (at_s, sender, data[:6] + n.to_bytes(2, "big"))
        for n, (at_s, sender, data) in enumerate(sent)
    ]
    runs = [forward(sent, 0.0, 0.05, 0.1, 0.0) for _ in range(2)]
    assert runs[0] == runs[1]
    assert 1740 < len(runs[0]) < 1860
    assert len(forward(sent, 0.0, 0.0, 0.0, 0.0)) == 2000


def test_frames_to_no_host_go_to_all_others(forward: Forward) -> None:
    for address in (BROADCAST, frame(77)[:6]):
        came = forward([(0.0, 1, address + b"data")], 1e-5, 0.05, 0.0, 1.0)
        assert [host for _, host, _ in came] == [0, 2, 3]


def test_what_reaches_an_interface_that_is_down_is_lost(forward: Forward) -> None:
    came = forward([(0.0, 0, frame(1)), (0.0, 0, frame(2))], 1e-5, 0.05, 0.0, 1.0, down=1)
    assert [host for _, host, _ in came] == [2]


ECHO = """
import socket, sys, time
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind((sys.argv[1], 5001))
print("ready", flush=True)
while True:
    server.sendto(*server.recvfrom(100))
"""

ASK = """
import socket, sys, time
client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
client.settimeout(5)
for _ in range(20):
    start = time.monotonic()
    client.sendto(b"?", (sys.argv[1], 5001))
    client.recv(100)
    print(time.monotonic() - start)
"""


def _switch_of(cluster: EmulatedCluster) -> list[int]:
    """Ids of the processes in the switch's namespace."""
    return processes_in([cluster.hosts[0].namespace.replace("-host0", "-switch")])


def _round_trips_s(cluster: EmulatedCluster) -> list[float]:
    python, (first, second, *_) = [sys.executable, "-S", "-c"], cluster.hosts
    ask = first.command([*python, ASK, second.address])
    echo = second.command([*python, ECHO, second.address])
    with subprocess.Popen(echo, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        try:
            said = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=60)
        finally:
            server.kill()
    return [float(line) for line in said.stdout.split()]


@pytest.mark.alone
@pytest.mark.netns
def test_a_round_trip_takes_the_delay_twice() -> None:
    with EmulatedCluster(num_hosts=2, rate_mbit=100, delay_ms=30) as cluster:
        assert ", port queue 0.715 MiB, 30 ms each way" in cluster.describe(1)
        trips_s = _round_trips_s(cluster)
    assert min(trips_s) >= 0.06
    # The least: a busy machine makes a packet later and never earlier.
    assert min(trips_s) < 0.07


@pytest.mark.alone
@pytest.mark.netns
@pytest.mark.parametrize("flows", [[(0, 1)], [(0, 2), (1, 2)]], ids=["one flow", "incast"])
def test_bulk_transfer_takes_the_rate_and_the_delay(flows: list[tuple[int, int]]) -> None:
    num_bytes = 3_000_000
    least_s = len(flows) * num_bytes * 8 / 20e6 + 0.02
    with EmulatedCluster(num_hosts=3, rate_mbit=20, delay_ms=20) as cluster:
        before = cluster.hosts[0].wire_bytes()[0]
        seconds = [_seconds_of(cluster, flows, num_bytes) for _ in range(3)]
        sent = cluster.hosts[0].wire_bytes()[0] - before
    assert 0.98 * least_s < min(seconds) < 1.4 * least_s
    assert 3 * num_bytes < sent < 1.2 * 3 * num_bytes


@pytest.mark.netns
def test_loss_makes_tcp_send_again() -> None:
    def resent(loss: float) -> int:
        # Less than a port queues, so that none is dropped but by `loss`.
        with EmulatedCluster(num_hosts=2, rate_mbit=50, mtu=1500, loss=loss, delay_ms=1) as cluster:
            _seconds_of(cluster, [(0, 1)], 200_000)
            said = subprocess.run(
                cluster.hosts[0].command(["cat", "/proc/net/snmp"]), capture_output=True, text=True
            ).stdout
        names, values = (one.split() for one in said.splitlines() if one.startswith("Tcp:"))
        return int(values[names.index("RetransSegs")])

    assert resent(0.1) >= 5
    assert resent(0.0) <= 2


@pytest.mark.netns
def test_one_process_forwards_and_is_gone_with_the_cluster() -> None:
    before = _namespaces()
    with EmulatedCluster(num_hosts=2, rate_mbit=100) as cluster:
        assert _switch_of(cluster) == []
    for options in ({"delay_ms": 1.0}, {"loss": 0.01}):
        with EmulatedCluster(num_hosts=2, rate_mbit=None, **options) as cluster:
            (process,) = _switch_of(cluster)
            # What ends a run's ranks spares it, so that the next run finds the network.
            for _ in range(2):
                assert run_on_cluster(cluster, ["true"]) == 0
                assert _switch_of(cluster) == [process]
            if "loss" not in options:
                assert len(_round_trips_s(cluster)) == 20
        assert not _runs(str(process))
    assert _namespaces() == before


@pytest.mark.netns
def test_the_process_ends_with_a_killed_parent() -> None:
    program = RUN.replace("rate_mbit=None", "rate_mbit=10, delay_ms=1")
    with subprocess.Popen(
        [sys.executable, "-c", program, WAIT], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        names = [path.name for path in NAMESPACES.glob(f"dear-{parent.pid}-0-*")]
        _until(lambda: len(processes_in(names)) == 3)  # rank 1 may be slower to start
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        try:
            _until(lambda: not any(_runs(str(one)) for one in processes_in(names)))
        finally:
            assert set(names) <= set(remove_stale_namespaces())


@pytest.mark.netns
def test_a_switch_that_ends_early_is_reported() -> None:
    before = _namespaces()
    cluster = EmulatedCluster(num_hosts=2, rate_mbit=100, delay_ms=1).__enter__()
    try:
        (process,) = _switch_of(cluster)
        os.kill(process, signal.SIGKILL)
        _until(lambda: not _runs(str(process)))
    finally:
        with pytest.warns(UserWarning, match="cluster ended early, with code -9"):
            cluster.__exit__()
    assert _namespaces() == before


@pytest.mark.netns
def test_missing_tap_devices_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hide = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/net && exec "$@"', "sh"]
    assert Path("/dev/net").is_dir()
    monkeypatch.setattr(
        "lightning_dear.emulation.cluster.SwitchProcess",
        lambda prefix, numbers: SwitchProcess([*prefix, *hide], numbers),
    )
    before = _namespaces()
    with (
        pytest.raises(
            EmulationUnavailable,
            match=r"delay_ms=5 and loss=0 need TAP devices \(/dev/net/tun: No such file.*\)\."
            " Run sudo modprobe tun; .* In a container, .* Or set both to 0",
        ),
        EmulatedCluster(num_hosts=2, rate_mbit=100, delay_ms=5),
    ):
        pass
    assert _namespaces() == before
