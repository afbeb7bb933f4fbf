"""Error feedback: what encoding has left out is kept from step to step, and sent later.

A memory keeps one fp32 value (or two) for each element that this rank encodes, in the order of the
bucket's gradients. Encoding writes pending values. When the optimizer has stepped, `commit` makes
them the kept ones. If the step is left out, `discard` drops them: after an overflow under a loss
scale, or if `zero_grad` was called instead of `step`. A compressor chooses its memory (see
`Compressor.worker_memory`). Momentum on the compressor's side is kept in a memory, too.

Gradients may be multiplied by a loss scale. Kept values never are, so that the scale may change.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

import torch
from torch import Generator, Tensor
from typing_extensions import override


class Decodes(Protocol):
    """The part of a codec that error feedback calls, to learn what receivers decode."""

    wire_dtype: ClassVar[torch.dtype | None]

    def decode(self, wire: Tensor, rows: Tensor, generator: Generator | None = None) -> None:
        """Writes the values that `wire` stands for into `rows`: see `Codec.decode`."""


@dataclass(frozen=True)
class Encoded:
    """Knows how some bytes were encoded, and so how to decode them.

    Attributes:
        codec: Codec that encoded them.
        seed: Seed of the generator that the codec was given. None means that it was given none.
    """

    codec: Decodes
    seed: int | None = None

    def generator(self, device: torch.device) -> Generator | None:
        """Returns a new generator, in the state in which the codec was given its own."""
        return None if self.seed is None else Generator(device).manual_seed(self.seed)

    def decode(self, wire: Tensor, rows: Tensor) -> None:
        """Writes the values that `wire` stands for into `rows`; `wire` is not mutated."""
        self.codec.decode(wire, rows, self.generator(rows.device))


class Memory:
    """Keeps what a compressor needs from step to step; this base class keeps nothing.

    Used as it is for compressors that are unbiased, vote, lose nothing, or have no feedback. An
    exchange makes up to two memories for each bucket: one for what a rank sends ("worker") and one
    for the mean of the shard that it owns ("owner").

    Args:
        numel: Number of elements that are encoded: of the bucket, a part of it, or the shard.
        device: Device of these elements.
        rate: Weight of the newest error in the moving average that "residual" is, in (0, 1]. The
            stored residual is rate x the error that is still to be sent. 1 means plain feedback.
        momentum: Factor by which kept momentum decays in each step, in [0, 1).

    Attributes:
        names: Names of the kept tensors, such as "residual".
        rate: Same as the argument.
        momentum: Same as the argument.
    """

    names: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, numel: int, device: torch.device, rate: float = 1.0, momentum: float = 0.0
    ) -> None:
        # Two tensors for each name, so that a step that is left out changes nothing that is kept.
        zeros = partial(torch.zeros, numel, dtype=torch.float32, device=device)
        self._kept = {name: zeros() for name in self.names}
        self._pending = {name: zeros() for name in self.names}
        self._has_pending = False
        self.rate, self.momentum = rate, momentum

    def compensate(self, rows: Tensor, scale: Tensor | None) -> None:
        """Turns gradients into the values to encode, in place, such as by adding the residual.

        Args:
            rows: [R, numel / R] fp32, contiguous; mutated.
            scale: Loss scale by which the gradients are multiplied. None means 1.
        """

    def note_sent(self, rows: Tensor, wire: Tensor, encoded: Encoded, scale: Tensor | None) -> None:
        """Computes what of `rows` has not been sent, and makes it pending.

        Args:
            rows: Values as `compensate` has left them; not mutated.
            wire: Encoded `rows`; not mutated.
            encoded: How they were encoded.
            scale: Loss scale that `compensate` was given.
        """

    def note_lost(self, lost: Tensor, scale: Tensor | None) -> None:
        """Makes the error pending, for compressors that do not encode row by row.

        Args:
            lost: Error of each element, in the layout of `compensate`'s rows; not mutated.
            scale: Loss scale that `compensate` was given.
        """

    def commit(self) -> None:
        """Makes the pending values the kept ones, once the optimizer has stepped."""
        if self._has_pending:
            # Swapped, not copied: the next encoding overwrites all of the other tensors.
            self._kept, self._pending = self._pending, self._kept
        self._has_pending = False

    def discard(self) -> None:
        """Drops the pending values, because the step is left out."""
        self._has_pending = False

    def keep(self, parts: Sequence[slice]) -> None:
        """Takes pending changes back for some ranges of elements, which no rank has used."""
        if self._has_pending:
            for name in self.names:
                for part in parts:
                    self._pending[name][part] = self._kept[name][part]

    def note_all_sent(self, but: Sequence[slice]) -> None:
        """Notes that all elements were sent uncompressed, except in the ranges `but`; commits."""
        for name, kept in self._kept.items():
            torch.mul(kept, 1 - self.rate, out=self._pending[name])
        self._has_pending = True
        self.keep(but)
        self.commit()

    def add(self, part: slice, values: Tensor) -> None:
        """Adds `values` to what is still to be sent of the range `part`, if there is a residual."""
        if "residual" in self.names:
            self._now["residual"][part].add_(values, alpha=self.rate)

    @property
    def kept(self) -> dict[str, Tensor]:
        """Returns name -> kept tensor, flat fp32; valid between steps only."""
        return dict(self._kept)

    def load(self, name: str, flat: Tensor) -> None:
        """Overwrites the kept tensor `name` with `flat`; to be called between steps."""
        self._kept[name].copy_(flat)

    @property
    def _now(self) -> dict[str, Tensor]:
        """Returns the kept tensors, or the pending ones if this step has encoded before."""
        return self._pending if self._has_pending else self._kept

    def _latest(self, name: str, like: Tensor) -> Tensor:
        return self._now[name].view_as(like)

    def _next(self, name: str, like: Tensor) -> Tensor:
        return self._pending[name].view_as(like)


class Residual(Memory):
    """Keeps the error of encoding: x = g + e is encoded, and then e' = x - C(x) is kept.

    The sum over steps is sum C(x) + e = sum g (Karimireddy et al. 2019, algorithm 1). With a rate b
    below 1 the residual is a moving average, e' = (1 - b) e + b (x - C(x)), and sum C(x) + e / b =
    sum g (Xie et al. 2024, "LoCo").
    """

    names: ClassVar[tuple[str, ...]] = ("residual",)

    @override
    def compensate(self, rows: Tensor, scale: Tensor | None) -> None:
        residual = self._latest("residual", rows)
        if scale is None:
            rows.add_(residual)
        else:
            rows.addcmul_(residual, scale)

    @override
    def note_sent(self, rows: Tensor, wire: Tensor, encoded: Encoded, scale: Tensor | None) -> None:
        # In a later round of a step both are the same tensor, so e is read before it is written.
        before, after = self._decayed(rows), self._next("residual", rows)
        # Decoded from the bytes, so that C(x) is what receivers get, to the last bit.
        encoded.decode(wire, after)
        self._keep(torch.sub(rows, after, out=after), before, scale)

    @override
    def note_lost(self, lost: Tensor, scale: Tensor | None) -> None:
        before = self._decayed(lost)
        self._keep(self._next("residual", lost).copy_(lost), before, scale)

    def _decayed(self, like: Tensor) -> Tensor | None:
        """Returns (1 - rate) x residual, which a moving average keeps. None means a rate of 1."""
        return self._latest("residual", like) * (1 - self.rate) if self.rate < 1 else None

    def _keep(self, lost: Tensor, before: Tensor | None, scale: Tensor | None) -> None:
        """Makes the pending residual from the error `lost`, which is that tensor, in place."""
        if scale is not None:
            lost.div_(scale)
        if before is not None:
            lost.mul_(self.rate).add_(before)
        self._has_pending = True
