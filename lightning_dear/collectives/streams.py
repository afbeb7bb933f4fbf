"""The queues in which a device does its work, and how one waits for another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override


class Streams:
    """The queues in which a device does its work. A CPU has none: all is done at once.

    Attributes:
        device: Whose queues they are; the CPU unless another is given.
        readers: The streams on which parameters are stepped, or were read in a recorded forward.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self.readers: set[Any] = set()

    @property
    def model(self) -> str:
        """Which model the device is; others may draw other numbers from the same seed."""
        return ""

    def current(self) -> Any:
        """The one on which the calling thread puts work; None where there are none."""
        return None

    def follow(self, others: Iterable[Any]) -> None:
        """Work put on the current one from now on waits for what is on `others`. Host: no wait."""

    def read_later(self, numbers: Tensor) -> Callable[[], list[int]]:
        """Takes what [n] `numbers` are now; what it returns blocks until that is known.

        The host does not wait before.
        """
        known: list[int] = numbers.tolist()
        return lambda: known

    def synchronize(self) -> None:
        """Blocks the host until all work is done."""

    def lead_readers(self) -> None:
        """Work put on `readers` from now on waits for what is on the current one. Host: no wait.

        So does what is put `beside`.
        """

    def beside(self) -> AbstractContextManager[Any]:
        """Work put on the current one in it goes to another, which waits for what it is told to.

        What is made in it is to be read elsewhere between `follow_beside` and `lead_readers` alone.
        """
        return nullcontext()

    def follow_beside(self) -> None:
        """Work put on the current one from now on waits for what was put `beside`."""


class CudaStreams(Streams):
    """Those of a CUDA device.

    Args:
        device: Which one.
        cuda: What is called: torch.cuda, or what stands in for it where a device is simulated.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        super().__init__(device)
        self._cuda = cuda
        self._beside: list[Any] = []

    @property
    @override
    def model(self) -> str:
        return str(self._cuda.get_device_name(self.device))

    @override
    def current(self) -> Any:
        return self._cuda.current_stream(self.device)

    @override
    def follow(self, others: Iterable[Any]) -> None:
        current = self.current()
        for other in others:
            if other != current:
                current.wait_stream(other)

    @override
    def read_later(self, numbers: Tensor) -> Callable[[], list[int]]:
        # Pinned, so that the host does not wait for the copy.
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=numbers.is_cuda)
        host.copy_(numbers, non_blocking=True)
        event = self._cuda.Event()
        event.record(self.current())

        def read() -> list[int]:
            event.synchronize()
            known: list[int] = host.tolist()
            return known

        return read

    @override
    def synchronize(self) -> None:
        self._cuda.synchronize(self.device)

    @override
    def lead_readers(self) -> None:
        current = self.current()
        for reader in (*self.readers, *self._beside):
            if reader != current:
                reader.wait_stream(current)

    @cached_property
    def _relay(self) -> Any:
        # Before kernels that compute: who waits for what it makes is another host.
        relay = self._cuda.Stream(self.device, priority=-1)
        self._beside.append(relay)
        return relay

    @override
    def beside(self) -> AbstractContextManager[Any]:
        return self._cuda.stream(self._relay)  # type: ignore[no-any-return]

    @override
    def follow_beside(self) -> None:
        self.follow(self._beside)
