"""Error feedback: what encoding loses is kept from step to step, and sent later.

A number for each element that is encoded here, in fp32, in the order of the bucket's gradients.
What an encoding changes is pending until its step is made: `commit` keeps it, `discard` forgets it,
as where a loss scale was too large or `zero_grad` was called instead of `step`. A codec says what
is kept for it (see `Compressor.worker_memory`); momentum that it brings is kept the same way,
beside the codec.

Gradients may come multiplied by a loss scale; what is kept is not, so that a scale may change.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

import torch
from torch import Generator, Tensor
from typing_extensions import override


class Decodes(Protocol):
    """Decodes rows: the part of a codec that is needed here."""

    wire_dtype: ClassVar[torch.dtype | None]

    def decode(self, wire: Tensor, rows: Tensor, generator: Generator | None = None) -> None:
        """See `Codec.decode`."""


@dataclass(frozen=True)
class Encoded:
    """Says how bytes were encoded, for whoever decodes them.

    Attributes:
        codec: By which.
        seed: Of what it has drawn; None: nothing.
    """

    codec: Decodes
    seed: int | None = None

    def generator(self, device: torch.device) -> Generator | None:
        """Returns a new one, in the state in which the codec got it."""
        return None if self.seed is None else Generator(device).manual_seed(self.seed)

    def decode(self, wire: Tensor, rows: Tensor) -> None:
        """Writes the numbers that `wire` stands for into `rows`."""
        self.codec.decode(wire, rows, self.generator(rows.device))


class Memory:
    """Keeps nothing: for codecs that are unbiased or vote, lose nothing, or have no feedback.

    Args:
        numel: Elements of the bucket, or of the shard.
        device: Where they are.
        rate: "residual" is what is still to be sent, times this; in (0, 1].
        momentum: What remains in a step of what is kept of gradients, where that is anything; in
            [0, 1).

    Attributes:
        names: Of what is kept.
        rate: See above.
        momentum: See above.
    """

    names: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, numel: int, device: torch.device, rate: float = 1.0, momentum: float = 0.0
    ) -> None:
        # Two of each, so that a step that is not made leaves what was kept before untouched.
        zeros = partial(torch.zeros, numel, dtype=torch.float32, device=device)
        self._kept = {name: zeros() for name in self.names}
        self._pending = {name: zeros() for name in self.names}
        self._has_pending = False
        self.rate, self.momentum = rate, momentum

    def compensate(self, rows: Tensor, scale: Tensor | None) -> None:
        """Turns gradients into what is to be encoded, in place.

        Args:
            rows: [R, numel / R] fp32, contiguous.
            scale: What the gradients are multiplied by; None: 1.
        """

    def note_sent(self, rows: Tensor, wire: Tensor, encoded: Encoded, scale: Tensor | None) -> None:
        """Notes what of `rows` has not been sent.

        Args:
            rows: As `compensate` has left them; not mutated.
            wire: Bytes of them.
            encoded: By what.
            scale: As before.
        """

    def note_lost(self, lost: Tensor, scale: Tensor | None) -> None:
        """Notes what has not been sent, as a whole; for what is not encoded row by row.

        Args:
            lost: In the layout of `compensate`'s rows; not mutated.
            scale: As before.
        """

    def commit(self) -> None:
        """Keeps what is pending: its step is made."""
        if self._has_pending:
            # No copy: what was kept is overwritten by what is pending next.
            self._kept, self._pending = self._pending, self._kept
        self._has_pending = False

    def discard(self) -> None:
        """Forgets what is pending: its gradients are void."""
        self._has_pending = False

    def keep(self, parts: Sequence[slice]) -> None:
        """Lets what was kept of `parts` stay as it was, whatever is pending."""
        if self._has_pending:
            for name in self.names:
                for part in parts:
                    self._pending[name][part] = self._kept[name][part]

    def note_all_sent(self, but: Sequence[slice]) -> None:
        """Notes that numbers were sent as `compensate` has left them, but for some parts."""
        for name, kept in self._kept.items():
            torch.mul(kept, 1 - self.rate, out=self._pending[name])
        self._has_pending = True
        self.keep(but)
        self.commit()

    def add(self, part: slice, numbers: Tensor) -> None:
        """Adds `numbers` to what is still to be sent of `part`, where anything is kept for that."""
        if "residual" in self.names:
            self._now["residual"][part].add_(numbers, alpha=self.rate)

    @property
    def kept(self) -> dict[str, Tensor]:
        """Returns name -> what is kept, flat fp32; to be read between steps."""
        return dict(self._kept)

    def load(self, name: str, flat: Tensor) -> None:
        """Overwrites what is kept, between steps."""
        self._kept[name].copy_(flat)

    @property
    def _now(self) -> dict[str, Tensor]:
        """What was kept, or what an earlier encoding of the same step has left of it."""
        return self._pending if self._has_pending else self._kept

    def _latest(self, name: str, like: Tensor) -> Tensor:
        return self._now[name].view_as(like)

    def _next(self, name: str, like: Tensor) -> Tensor:
        return self._pending[name].view_as(like)


class Residual(Memory):
    """Feeds errors back: x = g + e is encoded, and what that loses is kept, e' = x - C(x).

    So sum C(x) + e = sum g (Karimireddy et al. 2019, algorithm 1). With a rate b below 1 it is a
    moving average, e' = (1 - b) e + b (x - C(x)), and sum C(x) + e / b = sum g (Xie et al. 2024,
    "LoCo").
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
        # In a later round of a step both are the same memory, so that what was there is read first.
        before, after = self._decayed(rows), self._next("residual", rows)
        # From the bytes, as receivers do: what counts as sent is what they get, to the bit.
        encoded.decode(wire, after)
        self._keep(torch.sub(rows, after, out=after), before, scale)

    @override
    def note_lost(self, lost: Tensor, scale: Tensor | None) -> None:
        before = self._decayed(lost)
        self._keep(self._next("residual", lost).copy_(lost), before, scale)

    def _decayed(self, like: Tensor) -> Tensor | None:
        """What a moving average keeps of what was kept before."""
        return self._latest("residual", like) * (1 - self.rate) if self.rate < 1 else None

    def _keep(self, lost: Tensor, before: Tensor | None, scale: Tensor | None) -> None:
        if scale is not None:
            lost.div_(scale)
        if before is not None:
            lost.mul_(self.rate).add_(before)
        self._has_pending = True
