"""The streams on which a device works, and how one stream waits for another."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

Pairs = Sequence[tuple[Tensor, Tensor]]
"""Pairs (tensor on the device, tensor of the same size and dtype in memory of the host)."""


class Streams:
    """The streams on which a device works. This class is for a CPU, which has none.

    On a CPU an operation has ended when its call returns, so that most methods do nothing. On an
    accelerator (see `CudaStreams`) only `synchronize`, and the function that `read_later` returns,
    block the host.

    Attributes:
        device: The device; the CPU if the argument is None.
        readers: Streams on which parameters are stepped, or were read in a recorded forward. Other
            classes add to it. On a CPU it contains at most None.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self.readers: set[Any] = set()
        # The second stream, once it has been used.
        self._beside: list[Any] = []

    @property
    def model(self) -> str:
        """Model name of the device. Empty for a CPU.

        From the same seed two models may draw different random numbers.
        """
        return ""

    def current(self) -> Any:
        """Returns the stream on which the calling thread launches kernels; None on a CPU."""
        return None

    def follow(self, others: Iterable[Any]) -> None:
        """Makes the current stream wait for all kernels launched so far on the streams `others`.

        `others` may contain the current stream.
        """

    def read_later(self, numbers: Tensor) -> Callable[[], list[int]]:
        """Starts copying `numbers`, [n], to the host, with the values that they have now.

        Returns:
            A function that blocks until the copy has arrived, and returns the values.
        """
        known: list[int] = numbers.tolist()
        return lambda: known

    def holds(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies on the device."""
        return tensor.device.type == self.device.type

    def host_memory(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Returns new memory of the host, [elements], which copies to and from the device use."""
        return torch.empty(elements, dtype=dtype, device="cpu")

    def copy_down(self, tensor: Tensor, host: Tensor) -> Callable[[], None]:
        """Starts to copy a tensor of the device to the host, behind what the current stream does.

        Returns:
            A function that blocks until the copy has ended. Any thread may call it.
        """
        host.copy_(tensor)
        return lambda: None

    def copy_up(self, pairs: Pairs) -> Callable[[], None]:
        """Starts to copy memory of the host to tensors of the device.

        All kernels that use these tensors must have ended.

        Returns:
            A function that makes the current stream, and later copies down, wait for the copies.
        """
        for tensor, host in pairs:
            tensor.copy_(host)
        return lambda: None

    def synchronize(self) -> None:
        """Blocks the host until the device has run all kernels."""

    def lead_readers(self) -> None:
        """Makes the streams `readers` wait for all kernels launched so far on the current stream.

        The second stream (see `beside`) waits for them, too, if it has been used.
        """

    def beside(self) -> AbstractContextManager[Any]:
        """Returns a context in which the calling thread launches on a second stream.

        The second stream waits only for what the code inside the context makes it wait for. Tensors
        allocated inside may be used on other streams only after `follow_beside()` and before
        `lead_readers()`; afterwards their memory may be reused.
        """
        return nullcontext()

    def follow_beside(self) -> None:
        """Makes the current stream wait for all kernels launched so far on the second stream."""
        self.follow(self._beside)


class CudaStreams(Streams):
    """The streams of a CUDA device.

    Args:
        device: The device.
        cuda: Module that is called: `torch.cuda`, or a stand-in where tests simulate a device.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        super().__init__(device)
        self._cuda = cuda
        # The streams of copies to the host, and of copies to the device. Not made when first used:
        # two threads could make one each.
        self._down, self._up = cuda.Stream(device), cuda.Stream(device)

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
        # A copy to memory that is not pinned would block the host.
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=numbers.is_cuda)
        host.copy_(numbers, non_blocking=True)
        event = self._cuda.Event()
        event.record(self.current())

        def read() -> Any:
            event.synchronize()
            return host.tolist()

        return read

    @override
    def host_memory(self, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(elements, dtype=dtype, device="cpu", pin_memory=True)

    @override
    def copy_down(self, tensor: Tensor, host: Tensor) -> Callable[[], None]:
        self._down.wait_stream(self.current())
        with self._cuda.stream(self._down):
            host.copy_(tensor, non_blocking=True)
        # "blocking" means that the thread that waits sleeps.
        event = self._cuda.Event(blocking=True)
        event.record(self._down)

        def wait() -> None:
            # Also sets the device, which is another one in a new thread.
            with self._cuda.stream(self._down):
                event.synchronize()

        return wait

    @override
    def copy_up(self, pairs: Pairs) -> Callable[[], None]:
        with self._cuda.stream(self._up):
            for tensor, host in pairs:
                tensor.copy_(host, non_blocking=True)
        event = self._cuda.Event()
        event.record(self._up)

        def follow() -> None:
            self.current().wait_event(event)
            # Copies down fill the same memory again, which this copy still reads.
            self._down.wait_event(event)

        return follow

    @override
    def synchronize(self) -> None:
        self._cuda.synchronize(self.device)

    @override
    def lead_readers(self) -> None:
        current = self.current()
        for reader in (*self.readers, *self._beside):
            if reader != current:
                reader.wait_stream(current)

    @override
    def beside(self) -> AbstractContextManager[Any]:
        if not self._beside:
            # The second stream. Its kernels run before compute kernels, because other hosts wait
            # for what they make: encoded sums.
            self._beside.append(self._cuda.Stream(self.device, priority=-1))
        return self._cuda.stream(self._beside[0])  # type: ignore[no-any-return]
