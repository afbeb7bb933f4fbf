"""The switch of an emulated cluster whose links have a delay or lose packets, as a process.

The kernel's bridge has no delay, and many kernels lack `netem`. This file is also the program of
that process, and therefore needs the standard library only. The process makes a TAP device
`port0`, `port1`, ... for each host, in the switch's namespace; the cluster moves each into its
host. The devices vanish with the process.

    host 0                              the process                              host 1
    [ eth0 ] = queue, link at its rate = delay, loss = queue, link at its rate = [ eth0 ]
"""

import errno
import os
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random
from select import select
from typing import Any

_READY = "ready\n"

_TUN = "/dev/net/tun"
_TUNSETIFF = 0x400454CA
_IFF_TAP_WITHOUT_HEADER = 0x0002 | 0x1000

_LARGEST_FRAME = 1 << 16
_MOST_READS = 64  # of one host in a row, so that all others are served

# Several frames are handled at each awakening, which at 100 Mb/s saves a third of this process's
# time. A frame comes late by twice the pause at most.
_MOST_PAUSE_S = 0.0003


def mac_address(host: int) -> str:
    """Return the Ethernet address that a host must have for the switch to find it."""
    return f"02:00:00:00:00:{host:02x}"


class SwitchProcess:
    """A process that runs a `Switch`. It ends when `end` is called or this process is gone.

    Args:
        prefix: Start of a command line; runs the rest of it in the switch's namespace.
        numbers: Number of hosts, then `Switch`'s numbers in order.

    Raises:
        RuntimeError: If it could not make its devices; the message is its own.
    """

    def __init__(self, prefix: Sequence[str], numbers: Sequence[float]) -> None:
        # Without site-packages it starts at once, and whatever PYTHONPATH says.
        argv = [*prefix, sys.executable, "-I", "-S", __file__, *map(str, numbers)]
        pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        # The kernel closes its stdin with this process, even after SIGKILL. Ctrl-C must not end it
        # before the ranks, so it has a session of its own.
        self._process = subprocess.Popen(argv, **pipes, text=True, start_new_session=True)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != _READY:
            raise RuntimeError(self._kill())

    def end(self) -> None:
        """Kill the process. Blocks until it is gone; warns if it was before."""
        code = self._process.poll()
        said = self._kill()
        if code is not None:
            warnings.warn(
                f"The switch of this emulated cluster ended early, with code {code}. From then on"
                f" hosts could not reach each other. It said: {said}",
                stacklevel=3,
            )

    def _kill(self) -> str:
        """Return what it wrote to stderr."""
        self._process.kill()
        return str(self._process.communicate()[1]).strip()


@dataclass(eq=False)
class Switch:
    """Full-duplex links of one rate between a switch and its hosts, with delay and loss.

    All times are those of a model, which real time only starts: a frame that this process forwards
    late, because the machine is busy, does not delay the frames queued behind it.

    Args:
        devices: File descriptor of each host's TAP device; reads must not block.
        s_per_byte: Seconds that a link takes for a byte. 0 means no limit.
        delay_s: Seconds from the end of a frame on its sender's link to its receiver's link.
        loss: Probability that a frame is lost after its sender's link. The n-th frame that a link
            carries is lost in every run, or in none.
        queue_s: A link drops what comes while it needs more than these seconds for its queue.
    """

    devices: Sequence[int]
    s_per_byte: float
    delay_s: float
    loss: float
    queue_s: float

    def __post_init__(self) -> None:
        num_hosts = len(self.devices)
        self._pause_s = min(_MOST_PAUSE_S, self.delay_s / 16)
        self._randoms = [Random(host) for host in range(num_hosts)]
        addresses = [mac_address(host).replace(":", "") for host in range(num_hosts)]
        self._hosts = {bytes.fromhex(one): host for host, one in enumerate(addresses)}
        # When the link from each host, and to each host, has sent its whole queue.
        self._free_from_s = [0.0] * num_hosts
        self._free_to_s = [0.0] * num_hosts
        # (time, number, host, frame, whether it reaches this host then; else it comes from it).
        self._events: list[tuple[float, int, int, bytes, bool]] = []
        self._num_events = 0

    def run(self, until: int) -> None:
        """Forward frames until the descriptor `until` is closed at its other end. Blocks."""
        hosts = {device: host for host, device in enumerate(self.devices)}
        while True:
            readable, _, _ = select([until, *hosts], (), (), self._pass_on())
            if until in readable:
                return
            time.sleep(self._pause_s)
            for device in readable:
                self._read(hosts[device], device)

    def _pass_on(self) -> float | None:
        """Deliver what is due; return the seconds to the next event. None means no event."""
        events = self._events
        while events:
            if (wait_s := events[0][0] - time.monotonic()) > 0:
                return wait_s
            time_s, _, host, frame, reaches_host = heappop(events)
            if reaches_host:
                self._write(host, frame)
            else:
                self._arrive(time_s, host, frame)
        return None

    def _read(self, host: int, device: int) -> None:
        """Put what a host sends into the queue of its link."""
        for _ in range(_MOST_READS):
            try:
                frame = os.read(device, _LARGEST_FRAME)
            except BlockingIOError:
                return
            now_s = time.monotonic()
            start_s = max(now_s, self._free_from_s[host])
            if start_s - now_s > self.queue_s:
                continue
            self._free_from_s[host] = end_s = start_s + len(frame) * self.s_per_byte
            if self._randoms[host].random() >= self.loss:
                self._add(end_s + self.delay_s, host, frame, reaches_host=False)

    def _arrive(self, time_s: float, source: int, frame: bytes) -> None:
        """Put a frame into the queue of each receiver's link."""
        # Frames to no host's own address, such as ARP's questions, go to all others.
        receiver = self._hosts.get(frame[:6])
        others = [host for host in self._hosts.values() if host != source]
        for host in others if receiver is None else [receiver]:
            # A link that is free passes a frame on while it comes in: the rate counts once.
            free_s = self._free_to_s[host]
            if free_s - time_s <= self.queue_s:
                end_s = max(time_s, free_s + len(frame) * self.s_per_byte)
                self._free_to_s[host] = end_s
                self._add(end_s, host, frame, reaches_host=True)

    def _add(self, time_s: float, host: int, frame: bytes, *, reaches_host: bool) -> None:
        self._num_events += 1  # ties are passed on in order
        heappush(self._events, (time_s, self._num_events, host, frame, reaches_host))

    def _write(self, host: int, frame: bytes) -> None:
        try:
            os.write(self.devices[host], frame)
        except OSError as error:
            if error.errno != errno.EIO:  # the host has set its interface down
                raise


def _new_device(name: str) -> int:
    """Make a TAP device in this namespace; return its descriptor, with which it lives."""
    from fcntl import ioctl  # other systems can import this file

    device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
    # Without a header on each frame the kernel splits packets and sums them before they are read.
    ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP_WITHOUT_HEADER))
    return device


def _main() -> None:
    num_hosts, *numbers = sys.argv[1:]
    try:
        devices = [_new_device(f"port{host}") for host in range(int(num_hosts))]
    except OSError as error:
        sys.exit(f"{_TUN}: {error.strerror}")
    # Beside busy ranks frames would be late by 5 ms and more. Only the machine's own root may.
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    print(_READY, end="", flush=True)
    Switch(devices, *map(float, numbers)).run(sys.stdin.fileno())


if __name__ == "__main__":
    _main()
