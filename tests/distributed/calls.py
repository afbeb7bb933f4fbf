"""What the harness, its fork server and the ranks tell each other: plain records, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Host(Protocol):
    """Where a rank runs; `lightning_dear.emulation.EmulatedHost` is one."""

    @property
    def address(self) -> str:
        """IPv4 address of the host."""

    @property
    def interface(self) -> str:
        """Name of the network interface that carries `address`."""

    @property
    def namespace(self) -> str:
        """Its name in `ip netns list`."""


@dataclass(frozen=True)
class RankCall:
    """One function to be run by `world_size` ranks."""

    module: str
    qualname: str
    arguments: bytes
    """Pickled `(args, kwargs)`: only the ranks load them."""
    world_size: int
    timeout_s: float
    grace_s: float | None
    """Seconds the other ranks keep after the first failure; None: until the timeout."""
    linger: bool
    """Whether a rank that raised stays alive, with its sockets open, until the call is over."""
    init_process_group: bool
    keeps_ranks: bool
    """Whether ranks that returned wait for another such call of as many ranks."""
    env: dict[str, str]
    hosts: tuple[Host, ...] | None
    cwd: str
    sys_path: tuple[str, ...]


@dataclass(frozen=True)
class Returned:
    """The rank's function returned; `value` is pickled."""

    value: bytes


@dataclass(frozen=True)
class Raised:
    """The rank's function raised."""

    time_s: float
    """Monotonic clock, comparable between ranks of one machine."""
    message: str
    traceback: str


@dataclass(frozen=True)
class Died:
    """The rank's process ended without a report."""

    time_s: float
    exit_code: int
    """As in `subprocess`: minus the signal's number where a signal ended it."""
    stack: str
    """Python stacks at a fatal signal such as SIGSEGV; else empty."""


@dataclass(frozen=True)
class Hung:
    """The rank was still running at the timeout and was killed."""

    stack: str
    """Python stacks of all its threads when the time was up."""


@dataclass(frozen=True)
class Stopped:
    """The rank was still running when another rank's failure ended the call."""


Outcome = Returned | Raised | Died | Hung | Stopped
