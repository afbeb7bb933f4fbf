"""Codecs that send k elements of each row unchanged; all other elements arrive as zeros.

A place is the index of an element in its row.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_dear.compression.codec import Codec, FewOfMany, Randomness, field
from lightning_dear.compression.error_feedback import Encoded, Memory, Residual
from lightning_dear.compression.selectors import SELECTORS, select


@dataclass(frozen=True, kw_only=True)
class TopK(FewOfMany, Codec):
    """Sends the elements of a row with the k largest |x|, as k fp32 values and then k int32 places.

    A row takes 8 k bytes. Contractive: |C(x) - x|^2 <= (1 - d) |x|^2, with d = k / numel if
    `selector` is "exact" (Stich et al. 2018, "Sparsified SGD with memory", section 2). The selector
    "sampled" finds about k elements. If it finds fewer, slots of the message stay empty. An empty
    slot holds value 0 and place 0, which changes nothing, since decoding adds values.

    With error feedback, an element whose gradient g stays the same waits until its residual is as
    large as the elements that are sent, about mean|g| / density. So it waits for about
    mean|g| / (density |g|) steps: an element with an average gradient for 1 / density steps, an
    element with a tenth of that for 10 / density steps. In the gather half each owner encodes its
    shard of the mean, and so selects the k largest elements again.

    Args:
        density: Share of the elements that are sent, in (0, 1]. The default is 0.01.
        selector: "exact" (the default) finds the k largest elements with `torch.topk`. "sampled"
            is faster and finds about k, with a threshold that is estimated from a sample; see
            `lightning_dear.compression.selectors`.
        halves: See `Codec`.
        error_feedback: See `Compressor`.
    """

    name: ClassVar[str] = "topk"

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
        # Sent as int32, since torch's int64 places would take twice as many bytes.
        field(wire, torch.int32, 4 * k, k).copy_(places)

    @override
    def decode(self, wire: Tensor, rows: Tensor, generator: Generator | None = None) -> None:
        values, places = self._fields(wire)
        # Values are added, not assigned: empty slots hold place 0, and must not overwrite a value
        # that was sent from there.
        rows.zero_().scatter_add_(1, places, values)

    def sent_mask(self, wire: Tensor, mask: Tensor) -> None:
        """Marks the elements that were sent: those for which a value other than 0 arrives.

        A slot of value 0 does not count, whether it is empty or holds an element that is 0. So in
        `DGC` an element whose v is 0 keeps its momentum u, as in Lin et al. 2018, who compare
        |v| > threshold.

        Args:
            wire: [R, wire_bytes(numel)], filled by `encode`; not mutated.
            mask: [R, numel] bool or uint8, contiguous; overwritten with 1 where an element was
                sent, and 0 elsewhere.
        """
        values, places = self._fields(wire)
        # Added, not assigned: empty slots hold place 0, and must not clear its mark.
        mask.zero_().view(torch.uint8).scatter_add_(1, places, (values != 0).view(torch.uint8))

    def _fields(self, wire: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the values in `wire`, [R, k], a view, and their places, [R, k] int64."""
        k = wire.shape[1] // 8
        return field(wire, torch.float32, 0, k), field(wire, torch.int32, 4 * k, k).long()


@dataclass(frozen=True, kw_only=True)
class DGC(TopK):
    """Sends the k largest elements of a velocity: top-k with momentum correction (Lin et al. 2018).

    Messages are those of `TopK`. On each rank a `Velocity` replaces plain error feedback. With g
    the gradient, u = momentum u + g and v = v + u (section 3.2, momentum correction). v is encoded,
    and u and v become 0 where v was sent (section 3.3, momentum factor masking). An optimizer with
    momentum is refused. Weight decay that the optimizer adds to gradients is refused, too, unless
    `momentum` is 0: it would have to be part of u. Local gradient clipping (3.2) is left out. For
    warm-up (3.3) use a `CompressionSchedule`.

    In the gather half owners select the k largest elements of their shard of the mean, with plain
    error feedback, so that bytes do not grow with the number of ranks. (In the paper every rank
    gets all elements that any rank has selected.)

    The part of v that waits grows with momentum, too. With momentum m an element waits at most
    about 1 / (1 - m) steps longer than with `TopK`; with heavy-tailed gradients it waits about half
    as long as with `TopK`. With a density of 1 nothing waits and nothing is masked: that is SGD
    with momentum.

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
        self._check_value("momentum", "in [0, 1)", is_valid=0 <= self.momentum < 1)

    @property
    @override
    def takes_weight_decay(self) -> bool:
        return not self.momentum

    @override
    def worker_memory(self, numel: int, device: torch.device) -> Memory:
        return Velocity(numel, device, decay=self.momentum)


class Velocity(Memory):
    """Keeps u = momentum u + g and v = v + u of `DGC`, which become 0 where v was sent.

    u is kept as "momentum", and v as "residual" (Lin et al. 2018, sections 3.2 and 3.3). v is what
    is encoded. If all of v was sent, because the density is 1 or the step is not compressed, only v
    becomes 0.
    """

    names: ClassVar[tuple[str, ...]] = ("momentum", "residual")

    @override
    def compensate(self, rows: Tensor, scale: Tensor | None) -> None:
        is_first, momentum = not self._has_pending, self._next("momentum", rows)
        waiting = self._next("residual", rows)
        gradients = rows if scale is None else rows.div_(scale)
        if is_first:
            torch.mul(self._latest("momentum", rows), self.decay, out=momentum)
            torch.add(self._latest("residual", rows), momentum, out=waiting)
        # u decays once a step: in the first round (see `_now`). Later rounds of the step only add
        # their gradients to u and v.
        momentum.add_(gradients)
        waiting.add_(gradients)
        self._has_pending = True
        rows.copy_(waiting) if scale is None else torch.mul(waiting, scale, out=rows)

    @override
    def note_sent(self, rows: Tensor, wire: Tensor, encoded: Encoded, scale: Tensor | None) -> None:
        codec = encoded.codec
        if not isinstance(codec, TopK) or codec.density == 1:
            # All of v was sent. u is kept, as SGD with momentum does. Masking is meant only for
            # elements that have waited in v for several steps.
            self._next("residual", rows).zero_()
            return
        sent = torch.empty_like(rows, dtype=torch.bool)
        codec.sent_mask(wire, sent)
        for name in self.names:
            self._next(name, rows).masked_fill_(sent, 0.0)


@dataclass(frozen=True, kw_only=True)
class RandomK(FewOfMany, Codec):
    """Sends k elements at random places, which are equal on all ranks and so need not be sent.

    A row takes 4 k bytes. A row of numel elements is cut into k strata, at floor(i numel / k),
    whose lengths differ by at most 1. One element of each stratum is sent, at the same places in
    all rows of a call. (Stich et al. 2018, "Sparsified SGD with memory", section 2, draw k places
    from the whole row.)

    A starting place is drawn at random in each stratum. The following ceil(numel / k) steps send
    the elements of the stratum one after the other from there, and go on at its beginning after its
    end. Then another starting place is drawn. So each element is sent at least once in
    ceil(numel / k) steps, and waits for at most 2 ceil(numel / k) - 1 steps, however small it is.
    Both halves of a step send elements at the same places, since at other places the mean of what
    arrived is 0.

    Rows with the same places may be added up. So a reduce-scatter sums encoded rows. Contractive:
    E|C(x) - x|^2 <= (1 - d) |x|^2 with d = 1 / ceil(numel / k).

    A gradient fades while it waits: the residual is multiplied by `decay` in each step. Otherwise
    an element would arrive as the sum of numel / k gradients, and SGD would make a step as many
    times as large at once. With a usual learning rate and momentum, training then diverges.

    Args:
        density: Share of the elements that are sent, in (0, 1]. The default is 0.01.
        decay: Factor of the residual in each step, in [0, 1]. The default is 0.6: about
            1 / (1 - 0.6) = 2.5 gradients arrive at once. 1 means that all arrive, as with `TopK`.
            Any other value than the default is refused with error_feedback=False.
        halves: See `Codec`.
        error_feedback: See `Compressor`.
    """

    name: ClassVar[str] = "randomk"
    randomness: ClassVar[Randomness] = "turns"
    is_summable: ClassVar[bool] = True

    decay: float = 0.6

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_value("decay", "in [0, 1]", is_valid=0 <= self.decay <= 1)
        if not self.has_feedback and self.decay != RandomK.decay:
            raise ValueError(
                "decay of randomk has no effect with error_feedback=False. Leave out one of them:"
                " only what feedback keeps can decay."
            )

    @property
    @override
    def gradients_at_once(self) -> float:
        faded = super().gradients_at_once
        return faded if self.decay == 1 else min(faded, 1 / (1 - self.decay))

    @override
    def owner_memory(self, numel: int, device: torch.device) -> Memory:
        if not self.has_feedback:
            return super().owner_memory(numel, device)
        return Residual(numel, device, decay=self.decay)

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
        rows.zero_().index_copy_(1, _draw(rows, k, generator), field(wire, torch.float32, 0, k))


def _draw(rows: Tensor, k: int, generator: Generator | None) -> Tensor:
    """Returns one place of each stratum of a row, [k] int64, ascending.

    It depends on the seed of `generator`, from which no number is drawn. As many successive seeds,
    from a multiple on, as the longest stratum has elements give all places of each stratum.

    Args:
        rows: [R, numel]; its shape and device count.
        k: Number of strata.
        generator: Generator in the state in which `encode` or `decode` got it.

    Raises:
        ValueError: If `generator` is None.
    """
    if generator is None:
        raise ValueError("randomk needs a generator: pass encode and decode equally seeded ones.")
    longest = -(-rows.shape[1] // max(1, k))
    number, turn = divmod(generator.initial_seed(), max(1, longest))
    # Starts are drawn on the CPU, since other devices draw other numbers from the same seed.
    drawing = Generator().manual_seed(number)
    bounds = torch.arange(k + 1, device=rows.device) * rows.shape[1] // max(1, k)
    # Integers are drawn, since an fp32 number in [0, 1) has only 2^24 values, fewer than the places
    # of a long stratum. Their range is so much larger than a stratum that the remainder is nearly
    # uniform. The tensor is in pinned memory, so that the host does not wait for the copy to a GPU.
    host: Any = {"generator": drawing, "device": "cpu", "pin_memory": rows.is_cuda}
    drawn = torch.randint(turn, 2**62 + turn, (k,), **host).to(rows.device, non_blocking=True)
    return bounds[:-1] + drawn % bounds.diff()
