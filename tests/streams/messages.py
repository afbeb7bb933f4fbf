"""Simulated gloo: messages between ranks that are matched by tag, and travel between host memories.

A message is read as late as it may be: when its sender waits for it, or else when its receiver
does. It is written when its receiver waits. From the launch to the wait both memories belong to
the message: whoever else uses them meanwhile is in no order with it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from tests.streams.communicators import Calls, Collective, Communicator, Network, unseen
from tests.streams.device import Thread, extent_of, here, join, memory_of, this_thread

_POISON = 85


class _Key(NamedTuple):
    group: str
    source: int
    target: int
    tag: int


class Mail:
    """All messages of all ranks: of each key the sends and the receives, in order."""

    def __init__(self) -> None:
        self.sends: defaultdict[_Key, list[_Send]] = defaultdict(list)
        self.receives: defaultdict[_Key, list[_Receive]] = defaultdict(list)


class _Message:
    """One end of a message, and torch's work for it.

    Args:
        network: Over which.
        key: Of the message.
        tensor: Memory of this end.
        ends: The ends of this kind with this key, to which this one is added.
    """

    def __init__(self, network: Network, key: _Key, tensor: Tensor, ends: list[Any]) -> None:
        assert tensor.is_contiguous(), f"{key}: gloo takes contiguous tensors only"
        assert not memory_of(tensor).is_on_device, f"{key}: gloo sends no memory of a device"
        self.network, self.key, self.tensor = network, key, tensor
        self.number = len(ends)
        ends.append(self)
        # As a stream that begins where its thread is.
        self.way = Thread(here(), f"a message with tag {key.tag}", -1)

    def _await(self, others: list[Any]) -> Any:
        """Blocks until the other end is there, and returns it."""
        what = f"rank {self.key.source} or {self.key.target} with tag {self.key.tag}"
        self.network.turns.wait_until(this_thread().turn, what, lambda: len(others) > self.number)
        join(this_thread().clock, self.way.clock)
        return others[self.number]


class _Send(_Message):
    """See `_Message`."""

    def __init__(self, mail: Mail, network: Network, key: _Key, tensor: Tensor) -> None:
        super().__init__(network, key, tensor, mail.sends[key])
        self._mail = mail
        self._data: Tensor | None = None
        here().run(self.way, "isend", [extent_of(tensor)], [])

    def read(self) -> Tensor:
        """What travels."""
        if self._data is None:
            with unseen():
                self._data = self.tensor.clone()
        return self._data

    def wait(self, timeout: Any = None) -> None:
        """As torch's: gloo has sent once a receive is posted."""
        self._await(self._mail.receives[self.key])
        self.read()


class _Receive(_Message):
    """See `_Message`."""

    def __init__(self, mail: Mail, network: Network, key: _Key, tensor: Tensor) -> None:
        super().__init__(network, key, tensor, mail.receives[key])
        self._mail = mail
        here().run(self.way, "irecv", [], [extent_of(tensor)])
        with unseen():
            tensor.data.fill_(float("nan") if tensor.is_floating_point() else _POISON)

    def wait(self, timeout: Any = None) -> None:
        """As torch's."""
        sent = self._await(self._mail.sends[self.key]).read()
        with unseen():
            self.tensor.data.copy_(sent)


class HostCalls(Calls):
    """What stands in for torch.distributed on hosts, behind `Strict`.

    Args:
        network: Over which.
        mail: Of all ranks.
    """

    def __init__(self, network: Network, mail: Mail) -> None:
        super().__init__()
        self._network, self._mail = network, mail

    def isend(self, tensor: Tensor, dst: int, group: Communicator, tag: int) -> _Send:
        """See torch.distributed."""
        key = _Key(group.name, here().rank, dst, tag)
        return _Send(self._mail, self._network, key, tensor)

    def irecv(self, tensor: Tensor, src: int, group: Communicator, tag: int) -> _Receive:
        """See torch.distributed."""
        key = _Key(group.name, src, here().rank, tag)
        return _Receive(self._mail, self._network, key, tensor)

    def all_reduce(
        self,
        tensor: Tensor,
        op: Any = dist.ReduceOp.SUM,
        *,
        group: Any,
        async_op: bool = False,
    ) -> Any:
        """See torch.distributed."""
        assert async_op
        assert not memory_of(tensor).is_on_device
        return _AllReduce(tensor, group)


class _AllReduce:
    """gloo's own, matched by order.

    Args:
        tensor: Read and written.
        group: In which.
    """

    def __init__(self, tensor: Tensor, group: Communicator) -> None:
        self._collective = Collective("sum", tensor, tensor, group)
        self._way = Thread(here(), self._collective.name, -1)
        here().run(self._way, "all_reduce", [extent_of(tensor)], [extent_of(tensor)])
        group.num_launched += 1
        calls = group.network.calls.setdefault(self._collective.key, {})
        calls[here().rank] = self._collective

    def wait(self, timeout: Any = None) -> None:
        """As torch's."""
        self._collective._deliver()
        join(this_thread().clock, self._way.clock)
