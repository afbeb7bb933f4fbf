"""Checks that all ranks report, and that each can open a connection to every other one.

Runs before gloo or NCCL connects. Ranks meet at a key-value store, the same as torch's process
groups start from, so that the number of a missing rank is known. A collective cannot tell it. When
gloo or NCCL fails to connect, it names a socket. These checks name ranks, hosts and a remedy.
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
    """A rank did not report in time; the message names it."""


class MeetingPoint:
    """Exchange of small values through the store that rank 0 (or torchrun) serves.

    Args:
        host: Address of rank 0's host.
        port: Port at which the store listens.
        rank: This rank.
        world_size: Number of ranks.
        timeout_s: Seconds to wait for rank 0's host, and by default for every other rank.

    Raises:
        UnreachableError: If rank 0's host does not answer in time.
    """

    def __init__(self, host: str, port: int, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._place = f"{host}:{port}"
        # torchrun's agent serves the store already if this variable is True.
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
        """Return the `value` of every rank, in rank order. Collective. Blocks.

        Args:
            topic: Key of this exchange; a topic may be used once.
            value: This rank's value; JSON must be able to hold it.
            timeout_s: Seconds to wait for all ranks. None means the timeout of the constructor.

        Raises:
            UnreachableError: If ranks do not report in time; the message names them.
        """
        self.leave(topic, value)
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + timeout_s
        ranks = range(self.world_size)
        if missing := [rank for rank in ranks if not self._came(topic, rank, deadline_s)]:
            raise UnreachableError(
                f"{named(missing)} did not report to rank 0 at {self._place} within"
                f" {timeout_s:g} s (waiting for: {topic}). Check that the process runs and that"
                " its host reaches that address."
            )
        return [json.loads(self._store.get(f"{topic}/{rank}")) for rank in ranks]

    def leave(self, topic: str, value: Any) -> None:
        """Write this rank's `value` to the store without waiting for other ranks."""
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
    """Address at which a rank can be reached during the check.

    Attributes:
        rank: The rank.
        host: Name of the rank's host.
        address: IPv4 address that gloo would announce to the other ranks.
        port: Port at which the rank listens during the check.
    """

    rank: int
    host: str
    address: str
    port: int

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, {self.address}:{self.port})"


def open_door(num_ranks: int) -> socket.socket:
    """Return a socket that listens at the address to which other ranks would connect.

    Nothing is accepted: the kernel completes up to `num_ranks` connections by itself.
    """
    return socket.create_server((announced_address(), 0), backlog=num_ranks)


def knock_from(rank: int, doors: Sequence[Door]) -> list[str]:
    """Open a connection to every other rank; return a sentence for each one that fails.

    Args:
        rank: This rank.
        doors: Addresses of all ranks, in rank order.
    """
    here = doors[rank]
    return [
        f"rank {rank} (host {here.host}) -> {door}: {problem}{_advice(here, door)}"
        for door in doors
        if door != here and (problem := _knock(door)) is not None
    ]


def announced_address() -> str:
    """Return the IPv4 address that gloo uses on this host.

    It is that of the interface named in the environment. Without one it is the address that the
    host's own name resolves to, and if that fails it is loopback.

    Raises:
        ValueError: If the environment names an interface that does not exist.
    """
    for variable in INTERFACE_VARIABLES:
        name = os.environ.get(variable, "").split(",")[0].removeprefix("=")
        # For NCCL the name may also be a prefix, or ^name for any interface except that one. Which
        # one NCCL then chooses is unknown here.
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
                f" {socket.gethostname()} has no such interface, or it has no IPv4 address. Set the"
                f" variable to another of {', '.join(_interfaces())}, or unset it."
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
            ". Set cluster.interface or GLOO_SOCKET_IFNAME to the interface that joins the hosts. A"
            " loopback address cannot be reached from another host."
        )
    return ". Open all ports of any firewall between them. gloo and NCCL listen on random ports."
