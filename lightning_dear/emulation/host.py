"""One host of an emulated cluster: a network namespace with one interface."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dear.emulation.janitor import NAMESPACES
from lightning_dear.emulation.shell import run

_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class EmulatedHost:
    """A host of a running `EmulatedCluster`; a plain record that may be pickled.

    Attributes:
        index: Its place in the cluster, from 0.
        namespace: Its name in `ip netns list`.
        address: IPv4 address, without prefix length.
        interface: The interface that carries `address`; gloo's `GLOO_SOCKET_IFNAME`.
    """

    index: int
    namespace: str
    address: str
    interface: str

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return `argv` prefixed so that it runs on this host."""
        return ["ip", "netns", "exec", self.namespace, *argv]

    def enter(self) -> None:
        """Move the calling thread, and what it starts from now on, onto this host.

        For a child process, before it starts threads or opens sockets: other threads and open
        sockets stay where they are.

        Raises:
            OSError: The cluster has ended, or the caller is not root.
        """
        descriptor = os.open(NAMESPACES / self.namespace, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _set_network_namespace(descriptor)
        finally:
            os.close(descriptor)

    def wire_bytes(self) -> tuple[int, int]:
        """Return the bytes that the interface has sent and received since the cluster started.

        The kernel's counters: payload and the headers of Ethernet, IP and TCP. A segmented packet
        counts its headers once. May be called from inside the host or outside.

        Raises:
            EmulationUnavailable: The cluster has ended.
        """
        argv = ["ip", "-n", self.namespace, "-s", "-j", "link", "show", "dev", self.interface]
        counters = json.loads(run(argv))[0]["stats64"]
        return int(counters["tx"]["bytes"]), int(counters["rx"]["bytes"])


def _set_network_namespace(descriptor: int) -> None:
    # os.setns exists from Python 3.12 on.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot enter the network namespace: {os.strerror(number)}")
