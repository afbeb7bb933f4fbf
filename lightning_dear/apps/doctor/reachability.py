"""Whether every rank can open a connection to every other, tried before gloo or NCCL does.

A library that fails here names a socket; this names the ranks, the hosts and the way out.
"""

import fcntl
import os
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass

from lightning_dear.apps.checks import INTERFACE_VARIABLES

_CONNECT_S = 5.0
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Door:
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


class Doorkeeper:
    """Listens for the other ranks until closed, and answers each with this rank's number.

    Args:
        rank: This rank.
    """

    def __init__(self, rank: int) -> None:
        address = announced_address()
        self._socket = socket.create_server((address, 0), backlog=256)
        self.door = Door(rank, socket.gethostname(), address, self._socket.getsockname()[1])
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            with connection:
                connection.sendall(_greeting(self.door))

    def close(self) -> None:
        """Stop listening."""
        # Closing alone would leave the thread, and with it the port, in `accept`.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def unreachable_from(rank: int, doors: list[dict[str, object]]) -> list[str]:
    """Knock at every other rank's door; return one sentence for each that does not open.

    Args:
        rank: The rank that knocks.
        doors: Every rank's `Door`, as `dataclasses.asdict` gives it.
    """
    known = [Door(**door) for door in doors]  # type: ignore[arg-type]
    here = known[rank]
    failed = []
    for door in known:
        problem = None if door.rank == rank else _knock(door)
        if problem is not None:
            failed.append(
                f"rank {rank} (host {here.host}) -> {door}: {problem}{_advice(here, door)}"
            )
    return failed


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
        with socket.create_connection((door.address, door.port), timeout=_CONNECT_S) as connection:
            expected = _greeting(door)
            received = connection.recv(len(expected), socket.MSG_WAITALL)
    except TimeoutError:
        return f"no answer within {_CONNECT_S:g} s"
    except OSError as error:
        return str(error.strerror or error).lower()
    return None if received == expected else "something else answers there"


def _advice(here: Door, door: Door) -> str:
    if door.address.startswith("127.") and here.host != door.host:
        return (
            "; a loopback address cannot be reached from another host: set cluster.interface or"
            " GLOO_SOCKET_IFNAME to the interface that joins the hosts"
        )
    return "; is a firewall between them? gloo and NCCL listen on ports that the kernel picks"


def _greeting(door: Door) -> bytes:
    return f"lightning_dear {door.rank} {door.port}".encode()
