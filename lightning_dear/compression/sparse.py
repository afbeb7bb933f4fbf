"""Codecs that send k elements of each row as they are; all other elements arrive as zeros.

A place is the index of an element in its row.
"""

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
    et al. 2018, "Sparsified SGD with memory", section 2). The selector "sampled" finds about k
    elements and may leave slots of the message empty. An empty slot holds value 0 and place 0,
    which changes nothing, since decoding adds values.

    With error feedback, an element whose gradient g stays the same waits until its residual is as
    large as the elements that are sent, about mean|g| / density. It waits for about
    mean|g| / (density |g|) steps: an average element for 1 / density steps, one with a tenth of the
    average gradient for 10 / density. In the gather half each owner selects the k largest of the
    sums that have arrived.

    Args:
        density: Share of the elements that are sent, in (0, 1]. The default is 0.01.
        selector: "exact" (the default) uses `torch.topk`. "sampled" uses a threshold that is
            estimated from a sample; see `lightning_dear.compression.selectors`.
        halves: See `Codec`.
        error_feedback: See `Compressor`.
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
        # As int32: torch's int64 places would double the bytes for each of them.
        field(wire, torch.int32, 4 * k, k).copy_(places)

    @override
    def decode(self, wire: Tensor, rows: Tensor, generator: Generator | None = None) -> None:
        values, places = self._fields(wire)
        # Added, not assigned: empty slots name place 0, and must not overwrite the value sent from
        # there.
        rows.zero_().scatter_add_(1, places, values)

    def sent_mask(self, wire: Tensor, mask: Tensor) -> None:
        """Marks the elements that were sent: those for which a value other than 0 arrives.

        A slot whose value is 0 takes nothing from the residual, whether it is empty or not. So an
        element whose v is 0 keeps its momentum, as in Lin et al. 2018, who compare |v| > threshold.

        Args:
            wire: [R, wire_bytes(numel)], filled by `encode`; not mutated.
            mask: [R, numel] bool or uint8, contiguous; overwritten, with 1 where sent.
        """
        values, places = self._fields(wire)
        # Empty slots name place 0, which may have been sent, too: only values other than 0 count.
        mask.zero_().view(torch.uint8).scatter_add_(1, places, (values != 0).view(torch.uint8))

    def _fields(self, wire: Tensor) -> tuple[Tensor, Tensor]:
        """Returns [R, k] values and [R, k] int64 places of `wire`."""
        k = wire.shape[1] // 8
        return field(wire, torch.float32, 0, k), field(wire, torch.int32, 4 * k, k).long()


@dataclass(frozen=True, kw_only=True)
class DGC(TopK):
    """Sends the k largest elements of a velocity: top-k with momentum correction (Lin et al. 2018).

    Bytes are those of `TopK`. On each rank a `Velocity` replaces plain error feedback:
    u = momentum u + g and v = v + u (section 3.2, momentum correction). v is encoded, and where it
    was sent u and v become 0 (section 3.3, momentum factor masking). The optimizer must have no
    momentum, and no weight decay, which would have to be added before u. Local gradient clipping
    (3.2) is left out. For warm-up (3.3) use a `CompressionSchedule`.

    Owners select the k largest of the sums again, with plain error feedback, so that bytes do not
    grow with the number of ranks. (In the paper every rank gets all that any rank has selected.)

    What waits in v grows as momentum does. With momentum m an element waits at most about
    1 / (1 - m) steps longer than with `TopK`; with heavy-tailed gradients about half as long. With
    a density of 1 nothing waits and nothing is masked: that is SGD with momentum.

    Args:
        density: Share of the elements that are sent, in (0, 1]. The default is 0.001.
        selector: See `TopK`. The default is "sampled".
        momentum: m, factor by which u decays in each step, in [0, 1). The default is 0.9.
        halves: See `Codec`.
        error_feedback: Must not be False, since DGC is a form of error feedback.
    """

    name: ClassVar[str] = "dgc"
    brings_momentum: ClassVar[bool] = True

    density: float = 0.001
    selector: str = "sampled"
    momentum: float = 0.9

    @override
    def __post_init__(self) -> None:
        if self.error_feedback is False:
            raise ValueError("dgc needs error feedback: use topk with error_feedback=False.")
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum of dgc must be in [0, 1), got {self.momentum}.")

    @property
    @override
    def takes_weight_decay(self) -> bool:
        return not self.momentum

    @override
    def worker_memory(self, numel: int, device: torch.device) -> Memory:
        return Velocity(numel, device, momentum=self.momentum)


class Velocity(Memory):
    """Keeps DGC's u = momentum u + g and v = v + u, which become 0 where v was sent.

    u is kept as "momentum", v as "residual" (Lin et al. 2018, sections 3.2 and 3.3).
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
        # Only the first round of a step decays u; later rounds add their gradients to u and v.
        momentum.add_(gradients)
        waiting.add_(gradients)
        self._has_pending = True
        rows.copy_(waiting) if scale is None else torch.mul(waiting, scale, out=rows)

    @override
    def note_sent(self, rows: Tensor, wire: Tensor, encoded: Encoded, scale: Tensor | None) -> None:
        codec = encoded.codec
        if not isinstance(codec, TopK) or codec.density == 1:
            # All of v was sent. u is kept, as SGD with momentum keeps it: only elements that have
            # waited in v for several steps have to lose their momentum.
            self._next("residual", rows).zero_()
            return
        sent = torch.empty_like(rows, dtype=torch.bool)
        codec.sent_mask(wire, sent)
        for name in self.names:
            self._next(name, rows).masked_fill_(sent, 0.0)


@dataclass(frozen=True, kw_only=True)
class RandomK(FewOfMany, Codec):
    """Sends k elements at random places that all ranks draw alike: 4 k bytes, no places.

    A row of numel elements is cut into k strata, at floor(i numel / k), whose lengths differ by at
    most 1. One element of each stratum is sent, at the same place in all rows of a call. (Stich et
    al. 2018, "Sparsified SGD with memory", section 2, draw k places from the whole row.)

    A start is drawn at random in each stratum, and the following ceil(numel / k) steps send one
    element after the other from there. Then another start is drawn. So each element is sent once in
    ceil(numel / k) steps, and waits for at most 2 ceil(numel / k) - 1 steps, however small it is.
    Both halves of a step send the same places, since at others the mean has nothing new.

    Rows with the same places may be added up, so that a reduce-scatter sums them. Contractive:
    E|C(x) - x|^2 <= (1 - d) |x|^2 with d = 1 / ceil(numel / k).

    Args:
        density: Share of the elements that are sent, in (0, 1]. The default is 0.01.
        halves: See `Codec`.
        error_feedback: See `Compressor`.
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
    """Returns one place of each stratum, [k] int64, ascending.

    Successive seeds of the generator give all places of a stratum before any comes again.
    """
    if generator is None:
        raise ValueError("randomk needs a generator: pass encode and decode equally seeded ones.")
    longest = -(-rows.shape[1] // max(1, k))
    number, turn = divmod(generator.initial_seed(), max(1, longest))
    # Drawn on the CPU, since other devices draw other numbers from the same seed.
    drawing = Generator().manual_seed(number)
    bounds = torch.arange(k + 1, device=rows.device) * rows.shape[1] // max(1, k)
    # Integers are drawn, since an fp32 number in [0, 1) reaches only 2^24 places of a long stratum.
    # The range is so much larger than a stratum that the remainder is nearly uniform. The tensor is
    # pinned, so that the host does not wait for the copy to the device.
    host: Any = {"generator": drawing, "device": "cpu", "pin_memory": rows.is_cuda}
    drawn = torch.randint(turn, 2**62 + turn, (k,), **host).to(rows.device, non_blocking=True)
    return bounds[:-1] + drawn % bounds.diff()
