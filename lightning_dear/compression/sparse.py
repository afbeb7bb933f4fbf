"""A few numbers of each row travel as they are, and the others count as zeros."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_dear.compression.codec import Codec, FewOfMany, Kind, Randomness, field
from lightning_dear.compression.error_feedback import Encoded, Memory
from lightning_dear.compression.selectors import SELECTORS, select


@dataclass(frozen=True, kw_only=True)
class TopK(FewOfMany, Codec):
    """Sends the k largest |x|, as k fp32 values and then k int32 places: 8 k bytes.

    Contractive, |C(x) - x|^2 <= (1 - d) |x|^2, with d = k / numel where `selector` is exact (Stich
    et al. 2018, "Sparsified SGD with memory", section 2). Threshold selectors find about k and may
    leave slots empty; these hold the value 0 and the place 0, and decoding adds, so that they
    change nothing.

    With feedback a number whose gradient stays g waits until its residual is as large as what is
    sent, about mean|g| / density: so for about mean|g| / (density |g|) steps. An average one has
    its turn every 1 / density steps, one of a tenth of that size every 10 / density. In the second
    half owners select in the same way of the sums that arrive.

    Args:
        density: See `FewOfMany`.
        selector: exact: `torch.topk`. sampled: threshold from a sample. See
            `lightning_dear.compression.selectors`.
    """

    name: ClassVar[str] = "topk"
    kind: ClassVar[Kind] = "contractive"

    selector: str = "exact"

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_name("selector", (*SELECTORS,))

    @override
    def wire_bytes(self, numel: int) -> int:
        return 8 * self.entries(numel)

    @override
    def encode(self, rows: Tensor, wire: Tensor, generator: Generator | None = None) -> None:
        numel = rows.shape[1]
        k = self.entries(numel)
        if not k:
            return
        places = select(self.selector, rows, k)
        empty = places == numel
        places = places.masked_fill_(empty, 0)
        field(wire, torch.float32, 0, k).copy_(rows.gather(1, places).masked_fill_(empty, 0.0))
        # torch's places are int64, which would double what travels for each.
        field(wire, torch.int32, 4 * k, k).copy_(places)

    @override
    def decode(self, wire: Tensor, rows: Tensor, generator: Generator | None = None) -> None:
        values, places = self._fields(wire)
        # Added, not written: empty slots all name place 0, and must leave what was sent from there.
        rows.zero_().scatter_add_(1, places, values)

    def sent_mask(self, wire: Tensor, mask: Tensor) -> None:
        """Mark what has been sent: where a number other than 0 arrives.

        A zero that fills a slot, chosen or not, takes nothing away from what waits to be sent. So
        a place whose sum is 0 keeps its momentum, as where Lin et al. 2018 compare |v| > threshold.

        Args:
            wire: [R, wire_bytes(numel)], as `encode` has filled it; not mutated.
            mask: [R, numel] bool or uint8, contiguous; overwritten, with 1 where sent.
        """
        values, places = self._fields(wire)
        # Empty slots name place 0, which may have been sent as well; only numbers add a 1.
        mask.zero_().view(torch.uint8).scatter_add_(1, places, (values != 0).view(torch.uint8))

    def _fields(self, wire: Tensor) -> tuple[Tensor, Tensor]:
        """[R, k] values and [R, k] int64 places."""
        k = wire.shape[1] // 8
        return field(wire, torch.float32, 0, k), field(wire, torch.int32, 4 * k, k).long()


@dataclass(frozen=True, kw_only=True)
class DGC(TopK):
    """Sends top-k of gradients whose momentum is corrected (Lin et al. 2018).

    On the wire it is `TopK`. The rest is done before, by a `Velocity` in place of plain feedback:
    u = momentum u + g and v = v + u (section 3.2, momentum correction), v is encoded, and u and v
    become 0 where `sent_mask` says that v was sent (3.3, momentum factor masking). The optimizer
    must have no momentum of its own, and no weight decay, which belongs into u. Local clipping
    (3.2) is left out, and warming up (3.3) is a `CompressionSchedule`'s.

    Owners select `density` of the sums again, with plain feedback, so that bytes do not grow with
    the number of ranks. (Lin et al. send everybody all that any rank has selected.)

    What waits grows as momentum does, so that a number waits about 1 / (1 - m) steps longer than
    with `TopK`, at most; of heavy-tailed gradients about half as long. With a density of 1
    nothing waits, and nothing is masked: SGD with momentum.

    Args:
        density: See `FewOfMany`.
        selector: See `TopK`.
        momentum: m, in [0, 1).
    """

    name: ClassVar[str] = "dgc"
    brings_momentum: ClassVar[bool] = True

    density: float = 0.001
    selector: str = "sampled"
    momentum: float = 0.9

    @override
    def __post_init__(self) -> None:
        if self.error_feedback is False:
            raise ValueError("dgc is nothing but a form of error feedback: use topk without.")
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}.")

    @property
    @override
    def takes_weight_decay(self) -> bool:
        return not self.momentum

    @override
    def worker_memory(self, numel: int, device: torch.device) -> Memory:
        return Velocity(numel, device, momentum=self.momentum)


class Velocity(Memory):
    """Keeps DGC's u = momentum u + g and v = v + u, which become 0 where v was sent.

    Momentum correction and momentum factor masking (Lin et al. 2018, 3.2 and 3.3).
    """

    names: ClassVar[tuple[str, ...]] = ("momentum", "residual")

    @override
    def compensate(self, rows: Tensor, scale: Tensor | None) -> None:
        is_first, momentum = not self._has_pending, self._next("momentum", rows)
        waiting = self._next("residual", rows)
        gradients = rows if scale is None else rows.div_(scale)
        if is_first:
            torch.mul(self._latest("momentum", rows), self.momentum, out=momentum)
            torch.add(self._latest("residual", rows), momentum, out=waiting)
        # Gradients that come in several rounds of one step add up.
        momentum.add_(gradients)
        waiting.add_(gradients)
        self._has_pending = True
        rows.copy_(waiting) if scale is None else torch.mul(waiting, scale, out=rows)

    @override
    def note_sent(self, rows: Tensor, wire: Tensor, encoded: Encoded, scale: Tensor | None) -> None:
        codec = encoded.codec
        if not isinstance(codec, TopK) or codec.density == 1:
            # A dense step is one of SGD with momentum: nothing waits that could have become stale.
            self._next("residual", rows).zero_()
            return
        sent = torch.empty_like(rows, dtype=torch.bool)
        codec.sent_mask(wire, sent)
        for name in self.names:
            self._next(name, rows).masked_fill_(sent, 0.0)


@dataclass(frozen=True, kw_only=True)
class RandomK(FewOfMany, Codec):
    """Sends k numbers at random places that all ranks draw alike: 4 k bytes, no places.

    A row is cut into k strata at floor(i numel / k), whose lengths differ by 1 at most. Of each
    stratum one number travels, the same one in all rows of a call. (Stich et al. 2018, "Sparsified
    SGD with memory", section 2, draw k places of all.)

    Each stratum is gone through from a place drawn at random, which is drawn anew every
    ceil(numel / k) steps. So every number has its turn in so many steps, and waits for at most
    2 ceil(numel / k) - 1 of them, however small it is. Both halves of a step send the same places:
    at others the mean has nothing that has just arrived.

    Values at the same places add up, so that a reduce-scatter sums them on their way. Contractive:
    E|C(x) - x|^2 <= (1 - d) |x|^2 with d = 1 / ceil(numel / k).

    Args:
        density: See `FewOfMany`.
    """

    name: ClassVar[str] = "randomk"
    kind: ClassVar[Kind] = "contractive"
    randomness: ClassVar[Randomness] = "turns"
    is_summable: ClassVar[bool] = True

    @override
    def wire_bytes(self, numel: int) -> int:
        return 4 * self.entries(numel)

    @override
    def encode(self, rows: Tensor, wire: Tensor, generator: Generator | None = None) -> None:
        k = self.entries(rows.shape[1])
        field(wire, torch.float32, 0, k).copy_(rows.index_select(1, _draw(rows, k, generator)))

    @override
    def decode(self, wire: Tensor, rows: Tensor, generator: Generator | None = None) -> None:
        k = self.entries(rows.shape[1])
        places = _draw(rows, k, generator)
        rows.zero_().index_copy_(1, places, field(wire, torch.float32, 0, k))


def _draw(rows: Tensor, k: int, generator: Generator | None) -> Tensor:
    """One place of each stratum, [k] int64, ascending.

    Seeds that follow each other give all places of a stratum before any comes again.
    """
    if generator is None:
        raise ValueError("randomk needs a generator: the same seed in encode and in decode.")
    longest = -(-rows.shape[1] // max(1, k))
    number, turn = divmod(generator.initial_seed(), max(1, longest))
    # On the CPU, since other devices draw other numbers from the same seed, even of one maker.
    drawing = Generator().manual_seed(number)
    bounds = torch.arange(k + 1, device=rows.device) * rows.shape[1] // max(1, k)
    # Integers: a fp32 number in [0, 1) reaches only 2^24 of a long stratum's places.
    # So many more than places that the remainder favours none of them noticeably.
    # Pinned, so that the host does not wait for the device.
    host: Any = {"generator": drawing, "device": "cpu", "pin_memory": rows.is_cuda}
    drawn = torch.randint(turn, 2**62 + turn, (k,), **host).to(rows.device, non_blocking=True)
    return bounds[:-1] + drawn % bounds.diff()
