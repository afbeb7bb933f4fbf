"""Whether ranks come, and whether each can open a connection to every other one.

Tried before gloo or NCCL does. Ranks meet at a key-value store, the one that torch's process groups
start from: a rank that does not come is then known by its number, which a collective cannot tell.
A library that fails to connect names a socket; this names the ranks, the hosts and the way out.
"""

import fcntl
import json
import os
import socket
import struct
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from lightning_dear.apps.checks import INTERFACE_VARIABLES

_PREFIX = "lightning_dear_doctor"
_CONNECT_S = 5.0
_SIOCGIFADDR = 0x8915


class UnreachableError(ConnectionError):
    """Ranks did not meet in time; the message names them."""


class MeetingPoint:
    """Exchange of small values through the store that rank 0 (or torchrun) keeps.

    Args:
        host: Address of rank 0's host.
        port: Where the store listens.
        rank: This rank.
        world_size: Number of ranks.
        timeout_s: How long to wait for rank 0's host, and by default for every other rank.

    Raises:
        UnreachableError: If rank 0's host does not answer in time.
    """

    def __init__(self, host: str, port: int, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._place = f"{host}:{port}"
        # torchrun's agent keeps the store already, and tells so in this variable.
        is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                host,
                port,
                is_master=rank == 0 and not is_kept,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except (RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0].rstrip(".")
            raise UnreachableError(
                f"Rank {rank} could not reach rank 0 at {self._place} within {timeout_s:g} s"
                f" ({reason}). Check that rank 0 runs, that MASTER_ADDR and"
                " MASTER_PORT name its host, and that no firewall closes that port."
            ) from None
        self._store = dist.PrefixStore(_PREFIX, store)  # type: ignore[attr-defined]

    def exchange(self, topic: str, value: Any, timeout_s: float | None = None) -> list[Any]:
        """Every rank's `value` (plain, as JSON can hold), in rank order. Blocks.

        Raises:
            UnreachableError: Naming the ranks that did not come.
        """
        self.leave(topic, value)
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + timeout_s
        ranks = range(self.world_size)
        missing = [rank for rank in ranks if not self._came(topic, rank, deadline_s)]
        if missing:
            raise UnreachableError(
                f"{named(missing)} did not report to rank 0 at {self._place} within"
                f" {timeout_s:g} s (waiting for: {topic}). Check that the process runs and that"
                " its host reaches that address."
            )
        return [json.loads(self._store.get(f"{topic}/{rank}")) for rank in ranks]

    def leave(self, topic: str, value: Any) -> None:
        """Hands in this rank's `value` without waiting for the others."""
        self._store.set(f"{topic}/{self.rank}", json.dumps(value))

    def _came(self, topic: str, rank: int, deadline_s: float) -> bool:
        left_s = max(0.01, deadline_s - time.monotonic())
        try:
            self._store.wait([f"{topic}/{rank}"], timedelta(seconds=left_s))
        except RuntimeError:
            return False
        return True


def named(ranks: list[int]) -> str:
    """Return the ranks for a sentence: `Rank 1`, or `Ranks 1, 3`."""
    return f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class Door(NamedTuple):
    """Where a rank can be reached.

    Attributes:
        rank: The rank.
        host: Name of its host.
        address: The IPv4 address that gloo would tell the other ranks.
        port: Of a socket that listens there for the time of the check.
    """

    rank: int
    host: str
    address: str
    port: int

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, {self.address}:{self.port})"


def open_door(num_ranks: int) -> socket.socket:
    """Listen where other ranks would connect to this one, until the socket is closed.

    The kernel answers by itself; so many may knock before anything is accepted.
    """
    return socket.create_server((announced_address(), 0), backlog=num_ranks)


def knock_from(rank: int, doors: Sequence[Door]) -> list[str]:
    """Knock at every other rank's door; return one sentence for each that does not open.

    Args:
        rank: The rank that knocks.
        doors: Every rank's.
    """
    here = doors[rank]
    problems = {door: _knock(door) for door in doors if door != here}
    return [
        f"rank {rank} (host {here.host}) -> {door}: {problem}{_advice(here, door)}"
        for door, problem in problems.items()
        if problem is not None
    ]


def announced_address() -> str:
    """Return the IPv4 address that gloo takes on this host.

    That of the interface named in the environment, else what the host's own name resolves to,
    else loopback.

    Raises:
        ValueError: If the environment names an interface that is not there.
    """
    for variable in INTERFACE_VARIABLES:
        name = os.environ.get(variable, "").split(",")[0].removeprefix("=")
        # NCCL also takes a prefix, or ^name for any but that: it will choose, we cannot know.
        if name and (variable.startswith("GLOO") or name in _interfaces()):
            return interface_address(name)
    try:
        address = socket.gethostbyname(socket.gethostname())
        socket.create_server((address, 0)).close()
    except OSError:
        return "127.0.0.1"
    return address


def interface_address(name: str) -> str:
    """Return the IPv4 address of a network interface.

    Raises:
        ValueError: If there is no such interface, or it has no IPv4 address.
    """
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            raise ValueError(
                f"{' or '.join(INTERFACE_VARIABLES)} names {name!r}, but host"
                f" {socket.gethostname()} has no IPv4 interface of that name; it has"
                f" {', '.join(_interfaces())}."
            ) from None
    return socket.inet_ntoa(answer[20:24])


def _interfaces() -> list[str]:
    return sorted(name for _, name in socket.if_nameindex())


def _knock(door: Door) -> str | None:
    try:
        socket.create_connection((door.address, door.port), timeout=_CONNECT_S).close()
    except TimeoutError:
        return f"no answer within {_CONNECT_S:g} s"
    except OSError as error:
        return str(error.strerror or error).lower()
    return None


def _advice(here: Door, door: Door) -> str:
    if door.address.startswith("127.") and here.host != door.host:
        return (
            "; a loopback address cannot be reached from another host: set cluster.interface or"
            " GLOO_SOCKET_IFNAME to the interface that joins the hosts"
        )
    return "; is a firewall between them? gloo and NCCL listen on ports that the kernel picks"
