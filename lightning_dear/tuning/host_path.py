"""Measures the way of a device's messages through host memory, and predicts it beside NCCL.

See `collectives/staged.py` for the way: a copy down, the network, sums on the host, a copy up.
"""

import timeit
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch

from lightning_dear.collectives.streams import Streams
from lightning_dear.collectives.work import STATE_TAGS, Collectives, uncounted
from lightning_dear.planning.measured import sent_bytes
from lightning_dear.planning.plan import ALIGNMENT, aligned
from lightning_dear.planning.predict import KNOWN_ERROR
from lightning_dear.tuning.link_cost import slowest

_FIRST_BYTES, _MOST_BYTES = 1 << 18, 1 << 24
"""Bytes of the first message, and most bytes of a message or a copy."""

_MESSAGE_S = 0.05
"""Seconds that the second message should take."""

_NUM_REPEATS = 3


class HostPath(NamedTuple):
    """Seconds that one byte takes on each part of the way, on the slowest rank.

    Attributes:
        network_s: A byte that a rank sends through gloo, while all ranks send.
        bus_s: A byte that is copied between the device and the host, in the slower direction.
        sum_s: A byte that the host adds to a sum.
    """

    network_s: float
    bus_s: float
    sum_s: float

    def exchange_s(self, nbytes: float, world_size: int) -> tuple[float, float]:
        """Returns the seconds in which `nbytes` of gradients are reduced, and parameters gathered.

        Returns:
            (With NCCL at this rate of the network and without any copy; through the host, if no
            copy overlaps with anything). So both are bounds: the first from below, the second from
            above.
        """
        sent = sent_bytes(nbytes, world_size)
        network_s = 2 * sent * self.network_s
        copied = 2 * nbytes + 2 * nbytes / world_size
        return network_s, network_s + copied * self.bus_s + sent * self.sum_s

    def described(self, nbytes: float, world_size: int, nccl_s: float | None = None) -> str:
        """Returns a sentence for users about one exchange, with the seconds of both backends.

        Args:
            nbytes: Bytes of all gradients.
            world_size: Number of ranks.
            nccl_s: Measured seconds of the exchange with NCCL. None means that they are predicted.
        """
        least_s, host_s = self.exchange_s(nbytes, world_size)
        network, bus, sums = (1e-9 / max(one, 1e-15) for one in self)
        nccl = f"at least {least_s:.3g} s, predicted" if nccl_s is None else f"{nccl_s:.3g} s"
        (fast_s, faster), (slow_s, _) = sorted([(nccl_s or least_s, "nccl"), (host_s, "gloo")])
        share = 1 - fast_s / slow_s
        found = f"Up to {share:.0%} less with process_group_backend='{faster}'."
        return (
            f"An exchange of {nbytes / 1e6:.1f} MB takes at most {host_s:.3g} s through the host's"
            f" memory, predicted from rates ({network:.3g} GB/s of network, {bus:.3g} of bus,"
            f" {sums:.3g} of sums), and with NCCL {nccl}. "
            + (found if share > KNOWN_ERROR else "That is no real difference.")
        )


def measure_host_path(collectives: Collectives, streams: Streams, nbytes: int) -> HostPath:
    """Measures the way on all ranks at once. Collective. Blocks, usually for less than 0.3 s.

    Args:
        collectives: Collectives over gloo, for tensors of the host.
        streams: Streams of the device.
        nbytes: Bytes of all gradients; the same on all ranks.

    Returns:
        The same on all ranks.
    """
    most = aligned(min(nbytes, _MOST_BYTES) // 4, ALIGNMENT * collectives.world.size)
    memory = streams.host_memory(most, torch.float32).zero_()
    tensor, other = memory.to(streams.device, copy=True), torch.zeros_like(memory)

    def up() -> None:
        streams.copy_up([(tensor, memory)])()
        streams.synchronize()

    down_s = _median_s(lambda: streams.copy_down(tensor, memory)())
    own_s = [max(down_s, _median_s(up)), _median_s(lambda: other.add_(memory))]
    copied_s, added_s = slowest(collectives, own_s)
    with uncounted(collectives):
        sent_s = network_s(collectives, memory)
    return HostPath(sent_s, copied_s / memory.nbytes, added_s / memory.nbytes)


def network_s(collectives: Collectives, memory: torch.Tensor) -> float:
    """Returns the seconds for each byte that a rank sends. Collective. Blocks for some 0.2 s.

    Args:
        collectives: Collectives over gloo.
        memory: The largest message; mutated.
    """

    def message_s(numel: int) -> tuple[float, float]:
        message = memory[: min(aligned(numel, ALIGNMENT * size), memory.numel())]
        own_s = _median_s(lambda: collectives.launch_all_gather(message, STATE_TAGS).wait())
        (seconds,) = slowest(collectives, [own_s])
        return seconds, seconds / sent_bytes(message.nbytes, size)

    size = collectives.world.size
    seconds, _ = message_s(_FIRST_BYTES // 4)
    return message_s(int(_FIRST_BYTES // 4 * max(_MESSAGE_S / seconds, 1.0)))[1]


def _median_s(run: Callable[[], object]) -> float:
    """Returns the median seconds of `run`, after one run as a warm-up."""
    return median(timeit.repeat(run, repeat=1 + _NUM_REPEATS, number=1)[1:])
