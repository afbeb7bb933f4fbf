"""Set up and remove an emulated cluster.

    host 0                            switch
    [ host0 namespace: eth0 ] ======= [ port0 ]
                                      [       ] bridge
    [ host1 namespace: eth0 ] ======= [ port1 ]

Everything, the bridge included, lives in namespaces of its own: the machine's network is left
alone, and deleting the namespaces deletes all of it. If links have a delay or lose frames, a
process replaces bridge and ports (switch.py).
"""

import itertools
import json
import os
import re
import signal
import subprocess
import time
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_dear.emulation.shell import EmulationUnavailable, run, why_unavailable
from lightning_dear.emulation.switch import SwitchProcess, mac_address

NAMESPACES = Path("/run/netns")
"""Where `ip netns` keeps its names."""

MAX_HOSTS = 200

# With a small queue packets are dropped, and TCP's recovery would be measured instead of the
# strategy. At 1 Gb/s, 16 MiB is 0.13 s of queue; an all-reduce then reaches 90 % of the rate.
_QUEUE_MIB = 16
_TBF_BURST = "64kb"

# With a delay TCP does fill the queue, until packets are dropped: at 5 Mb/s 256 KiB are 0.4 s.
_LEAST_DELAYED_QUEUE = 256 << 10

_LEAST_BUFFER = 4096  # a page: the kernel's own least

_KILL_S = 5.0
_POLL_S = 0.02

_NAME = re.compile(r"dear-(?P<pid>\d+)-\d+-(switch|host\d+)")

_numbers = itertools.count()


@dataclass(frozen=True)
class EmulatedHost:
    """A host of a running `EmulatedCluster`; a plain record that may be pickled.

    Attributes:
        index: Number of the host in the cluster, from 0.
        namespace: Name of its network namespace in `ip netns list`.
        address: IPv4 address, without prefix length.
        interface: Interface that has `address`; ranks get it as `GLOO_SOCKET_IFNAME`.
    """

    index: int
    namespace: str
    address: str
    interface: str

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command that runs `argv` on this host."""
        return ["ip", "netns", "exec", self.namespace, *argv]

    def wire_bytes(self) -> tuple[int, int]:
        """Return the bytes that the interface has sent and received since the cluster started.

        These kernel counters include payload and the headers of Ethernet, IP and TCP. A segmented
        packet counts its headers once. Works inside the host and outside.

        Raises:
            EmulationUnavailable: If the cluster has ended.
        """
        argv = ["ip", "-n", self.namespace, "-s", "-j", "link", "show", "dev", self.interface]
        counters = json.loads(run(argv))[0]["stats64"]
        return int(counters["tx"]["bytes"]), int(counters["rx"]["bytes"])


@dataclass(eq=False)
class EmulatedCluster:
    """Hosts that are linked by one switch; a context manager.

        with EmulatedCluster(num_hosts=2, rate_mbit=1000) as cluster:
            subprocess.run(cluster.hosts[0].command(["ping", "-c1", cluster.hosts[1].address]))

    Entering creates the namespaces. Leaving, also by an exception, kills all processes in them and
    removes them. Namespaces of a process that was killed are removed by the next cluster on this
    machine.

    Args:
        num_hosts: Number of hosts, 1 to 200.
        rate_mbit: Rate of each link and direction in 10^6 bits per second, as the kernel counts
            them (with the headers of Ethernet, IP and TCP). None means no limit.
        mtu: Largest packet in bytes, on every interface.
        congestion_control: TCP's algorithm between hosts and within them, whatever this machine is
            set to; it changes figures by up to a third. "cubic" is Linux's default.
        socket_buffer_bytes: Most bytes of a socket's send buffer, and half of the most bytes of its
            receive buffer. None means the kernel's limits.
        delay_ms: Milliseconds that each packet takes from one host to another, one way, beside the
            time that it takes at `rate_mbit`: a round trip takes twice as long.
        loss: Share of the packets between hosts that are lost, at random.

    If `delay_ms` or `loss` is above 0, a process of this cluster forwards all packets. A link then
    drops packets if more than 256 KiB are queued, or more than it sends in a round trip if that is
    more; it passes no burst at once. Without both, the kernel forwards, and links queue 16 MiB.

    Attributes:
        hosts: The hosts in order; empty while the cluster is not entered.

    Raises:
        ValueError: If an argument is out of range.
    """

    num_hosts: int
    rate_mbit: float | None
    mtu: int = 9000
    congestion_control: str = "cubic"
    socket_buffer_bytes: int | None = None
    delay_ms: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        rate, most = self.rate_mbit, self.socket_buffer_bytes
        is_buffer = most is None or _LEAST_BUFFER <= most < 1 << 30
        sizes = f"{_LEAST_BUFFER} to 2^30 - 1, or None for the kernel's own."
        for name, is_valid, advice in (
            ("num_hosts", 1 <= self.num_hosts <= MAX_HOSTS, f"Choose 1 to {MAX_HOSTS}."),
            ("rate_mbit", rate is None or rate > 0, "Set it above 0, or None."),
            ("mtu", 576 <= self.mtu <= 65535, "mtu must be 576 to 65535 bytes."),
            ("socket_buffer_bytes", is_buffer, f"socket_buffer_bytes must be {sizes}"),
            ("delay_ms", 0 <= self.delay_ms <= 10_000, "Set it to 0 to 10000."),
            ("loss", 0 <= self.loss < 1, "Set it to a share: 0.01 means 1 %."),
        ):
            if not is_valid:
                raise ValueError(f"{name}={getattr(self, name)} is not valid. {advice}")
        self.hosts: tuple[EmulatedHost, ...] = ()
        self._namespaces: list[str] = []
        self._is_forwarded = self.delay_ms > 0 or self.loss > 0
        self._switch: SwitchProcess | None = None

    def __enter__(self) -> "EmulatedCluster":
        """Create the namespaces, links and rate limits. Takes about 0.1 s for each host.

        Raises:
            EmulationUnavailable: If the user is not root, iproute2 is missing, the kernel refuses,
                or it has no TAP devices, which links with delay or loss need.
            RuntimeError: If the cluster is entered already.
        """
        if self._namespaces:
            raise RuntimeError("This cluster is entered already. Make another EmulatedCluster.")
        if reason := why_unavailable():
            raise EmulationUnavailable(reason)
        remove_stale_namespaces()
        try:
            self._set_up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """End the processes that still run on the hosts, and remove the namespaces."""
        self.end_processes()
        if self._switch is not None:
            self._switch.end()
            self._switch = None
        while self._namespaces:
            _delete_namespace(self._namespaces.pop())
        self.hosts = ()

    def end_processes(self) -> None:
        """Kill all processes on the hosts. Blocks until they have ended, for at most 5 s."""
        if left := end_processes_in(name for name in self._namespaces if "-host" in name):
            warnings.warn(f"Processes {left} on the cluster do not end. Run kill -9.", stacklevel=2)

    def describe(self, ranks_per_host: int) -> str:
        """Return one line on hosts, links and sockets, to head figures measured on this cluster.

        The cluster must be entered.
        """
        limits = (f"/proc/sys/net/ipv4/{name}" for name in ("tcp_wmem", "tcp_rmem"))
        buffers = run(self.hosts[0].command(["cat", *limits])).splitlines()
        most = [f"{int(buffer.split()[2]) / (1 << 20):g}" for buffer in buffers]
        whose = "the kernel's" if self.socket_buffer_bytes is None else "capped"
        shape = "not shaped", "no port queue"
        if self.rate_mbit is not None:
            shape = f"{self.rate_mbit:g} Mb/s", f"port queue {self._queue_bytes / 2**20:.3g} MiB"
        far = f", {self.delay_ms:g} ms each way" if self.delay_ms else ""
        lossy = f", {self.loss:g} of packets lost" if self.loss else ""
        return (
            f"{self.num_hosts} emulated hosts x {ranks_per_host} ranks, {shape[0]},"
            f" {self.congestion_control}, socket buffers {whose} ({most[0]} MiB out,"
            f" {most[1]} in), MTU {self.mtu}, {shape[1]}{far}{lossy}"
        )

    @property
    def _queue_bytes(self) -> float:
        """Most bytes in the queue of a link that has a rate."""
        of_round_trip = 250 * self.delay_ms * (self.rate_mbit or 0)
        return max(_LEAST_DELAYED_QUEUE, of_round_trip) if self._is_forwarded else _QUEUE_MIB << 20

    def _set_up(self) -> None:
        prefix = f"dear-{os.getpid()}-{next(_numbers)}"
        switch = self._add_namespace(f"{prefix}-switch")
        if self._is_forwarded:
            self._start_switch(switch)
        else:
            _ip(switch, f"link add bridge mtu {self.mtu} type bridge")
            _ip(switch, "link set bridge up")
        names = [f"{prefix}-host{index}" for index in range(self.num_hosts)]
        self.hosts = tuple(self._add_host(index, name, switch) for index, name in enumerate(names))

    def _add_namespace(self, name: str) -> str:
        self._namespaces.append(name)
        run(["ip", "netns", "add", name])
        return name

    def _add_host(self, index: int, name: str, switch: str) -> EmulatedHost:
        host = EmulatedHost(index, self._add_namespace(name), f"10.0.0.{index + 1}", "eth0")
        port, ends = f"port{index}", f"name {host.interface} mtu {self.mtu} netns {name}"
        interfaces = [(name, host.interface)]
        if self._is_forwarded:
            _ip(switch, f"link set {port} {ends} address {mac_address(index)}")
        else:
            _ip(switch, f"link add {port} mtu {self.mtu} type veth peer {ends}")
            interfaces.append((switch, port))
        _ip(name, f"address add {host.address}/24 dev {host.interface}")
        for namespace, interface in interfaces:
            # IPv6 neighbour discovery would count as sent bytes. A kernel without IPv6 refuses.
            with suppress(EmulationUnavailable):
                _ip(namespace, f"link set {interface} addrgenmode none")
        _ip(name, f"link set {host.interface} up")
        _ip(name, "link set lo up")
        if not self._is_forwarded:
            _ip(switch, f"link set {port} master bridge up")
        if self.rate_mbit is not None and not self._is_forwarded:
            rate = f"rate {round(self.rate_mbit * 1e6)}bit burst {_TBF_BURST} limit {_QUEUE_MIB}mb"
            for namespace, interface in interfaces:
                run(["tc", "-n", namespace, *f"qdisc add dev {interface} root tbf {rate}".split()])
        self._set_congestion_control(host)
        self._limit_socket_buffers(host)
        return host

    def _start_switch(self, namespace: str) -> None:
        s_per_byte = 0.0 if self.rate_mbit is None else 8e-6 / self.rate_mbit
        queue_s = self._queue_bytes * s_per_byte
        numbers = (self.num_hosts, s_per_byte, self.delay_ms / 1e3, self.loss, queue_s)
        try:
            self._switch = SwitchProcess(["ip", "netns", "exec", namespace], numbers)
        except RuntimeError as error:
            raise EmulationUnavailable(
                f"delay_ms={self.delay_ms:g} and loss={self.loss:g} need TAP devices ({error}). Run"
                " sudo modprobe tun; if the file may not be opened, sudo chmod 666 /dev/net/tun. In"
                " a container, start it with --device /dev/net/tun. Or set both to 0"
            ) from None

    def _set_congestion_control(self, host: EmulatedHost) -> None:
        # Set on each route, because the namespace's sysctl accepts only algorithms that the machine
        # allows to all users. The first route leads to other hosts, the rest stay within this one.
        routes = (
            f"10.0.0.0/24 dev {host.interface} scope link src {host.address}",
            f"local {host.address} dev {host.interface} table local scope host src {host.address}",
            "local 127.0.0.0/8 dev lo table local scope host src 127.0.0.1",
            "local 127.0.0.1 dev lo table local scope host src 127.0.0.1",
        )
        chosen = f"proto kernel congctl {self.congestion_control}"
        try:
            for route in routes:
                _ip(host.namespace, f"route change {route} {chosen}")
        except EmulationUnavailable as error:
            raise EmulationUnavailable(
                f"congestion_control={self.congestion_control!r} was not set ({error}). Choose"
                " one of those in /proc/sys/net/ipv4/tcp_available_congestion_control, or load its"
                f" module first: sudo modprobe tcp_{self.congestion_control}"
            ) from None

    def _limit_socket_buffers(self, host: EmulatedHost) -> None:
        if self.socket_buffer_bytes is not None:
            # The kernel uses half of a receive buffer for the window and the rest for bookkeeping.
            for name, usual, times in (("tcp_wmem", 16 << 10, 1), ("tcp_rmem", 128 << 10, 2)):
                most = times * int(self.socket_buffer_bytes)
                limits = f"{_LEAST_BUFFER} {min(usual, most)} {most}"
                run(host.command(["sh", "-c", f"echo {limits} > /proc/sys/net/ipv4/{name}"]))


def remove_stale_namespaces() -> list[str]:
    """Remove namespaces of emulated clusters whose process is gone, and kill processes in them.

    Returns:
        Names of the removed namespaces.
    """
    names = sorted(path.name for path in NAMESPACES.glob("dear-*"))
    ours = filter(None, map(_NAME.fullmatch, names))
    stale = [one.string for one in ours if not Path("/proc", one["pid"]).exists()]
    end_processes_in(stale)
    for name in stale:
        _delete_namespace(name)
    return stale


def processes_in(namespaces: Iterable[str]) -> list[int]:
    """Return the ids of all processes, except this one, that run in one of the namespaces."""
    found: set[int] = set()
    for name in namespaces:
        command = ["ip", "netns", "pids", name]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        found.update(map(int, said.split()))
    return sorted(found - {os.getpid()})


def end_processes_in(namespaces: Iterable[str]) -> list[int]:
    """Kill all processes in the namespaces; return the ids of those that are left after 5 s.

    Also finds children that have left their parent's session, since every child inherits the
    network namespace. Blocks until all have ended, for at most 5 s.
    """
    names = list(namespaces)
    deadline = time.monotonic() + _KILL_S
    # Repeated, because a process may start another one before it is killed.
    while (left := processes_in(names)) and time.monotonic() < deadline:
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(_POLL_S)
    return left


def _ip(namespace: str, words: str) -> None:
    run(["ip", "-n", namespace, *words.split()])


def _delete_namespace(name: str) -> None:
    try:
        run(["ip", "netns", "delete", name])
    except EmulationUnavailable as error:
        # It may not exist: it was never made, or another process found it stale and removed it.
        if (NAMESPACES / name).exists():
            warnings.warn(
                f"Network namespace {name} was not removed ({error}). Run: sudo ip netns delete"
                f" {name}",
                stacklevel=2,
            )
