"""What a rank keeps of a bucket from step to step, so that what encoding loses is not lost.

A number for each element, in fp32, laid out like the bucket's gradients. What an encoding changes
is pending until its step is made: `commit` keeps it, `discard` forgets it, as where a loss scale
was too large or `zero_grad` was called instead of `step`.

Gradients may come multiplied by a loss scale; what is kept is not, so that a scale may change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_dear.compression.codec import Codec
from lightning_dear.compression.compressor import Compressor
from lightning_dear.compression.floats import Fp32
from lightning_dear.compression.integers import Int8, LoCo
from lightning_dear.compression.signs import Signum
from lightning_dear.compression.sparse import DGC


class Memory:
    """Keeps nothing: for codecs that are unbiased or vote, lose nothing, or have no feedback.

    Args:
        numel: Elements of the bucket, or of the shard.
        device: Where they are.

    Attributes:
        names: Of what is kept.
        rate: "residual" is what is still to be sent, times this.
    """

    names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, numel: int, device: torch.device) -> None:
        # Two of each, so that a step that is not made leaves what was kept before untouched.
        self._kept = {name: self._zeros(numel, device) for name in self.names}
        self._pending = {name: self._zeros(numel, device) for name in self.names}
        self._has_pending = False
        self.rate = 1.0

    def compensate(self, rows: Tensor, scale: Tensor | None) -> None:
        """Turns gradients into what is to be encoded, in place.

        Args:
            rows: [R, numel / R] fp32, contiguous.
            scale: What the gradients are multiplied by; None: 1.
        """

    def note_sent(
        self,
        rows: Tensor,
        codec: Codec,
        wire: Tensor,
        generator: Generator | None,
        scale: Tensor | None,
    ) -> None:
        """Notes what of `rows` has not been sent.

        Args:
            rows: As `compensate` has left them; not mutated.
            codec: That has encoded them.
            wire: Its bytes.
            generator: In the state in which `encode` got it, for codecs that share one.
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
        # Reading and writing what is kept may be decoding and encoding it.
        if parts and self._has_pending:
            for name in self.names:
                kept, pending = self._read(self._kept[name]), self._read(self._pending[name])
                for part in parts:
                    pending[part] = kept[part]
                self._write(self._pending[name], pending)

    def note_all_sent(self, but: Sequence[slice]) -> None:
        """Notes that numbers were sent as `compensate` has left them, but for some parts."""
        for name, kept in self.kept.items():
            left = torch.mul(kept, 1 - self.rate, out=self._next(name, kept))
            self._write(self._pending[name], left)
        self._has_pending = True
        self.keep(but)
        self.commit()

    def add(self, part: slice, numbers: Tensor) -> None:
        """Adds `numbers` to what is still to be sent of `part`, where anything is kept for that."""
        if "residual" in self.names:
            latest = (self._pending if self._has_pending else self._kept)["residual"]
            residual = self._read(latest)
            residual[part].add_(numbers, alpha=self.rate)
            self._write(latest, residual)

    @property
    def kept(self) -> dict[str, Tensor]:
        """Name -> what is kept, flat fp32; to be read between steps."""
        return {name: self._read(stored) for name, stored in self._kept.items()}

    def load(self, name: str, flat: Tensor) -> None:
        """Overwrites what is kept, between steps."""
        self._write(self._kept[name], flat)

    # --- how it is stored -----------------------------------------------------------------------

    def _zeros(self, numel: int, device: torch.device) -> Tensor:
        return torch.zeros(numel, dtype=torch.float32, device=device)

    def _read(self, stored: Tensor) -> Tensor:
        """Flat fp32: a view, or a copy that counts once it is written back."""
        return stored

    def _write(self, stored: Tensor, flat: Tensor) -> None:
        if stored.data_ptr() != flat.data_ptr():
            stored.copy_(flat)

    def _latest(self, name: str, like: Tensor) -> Tensor:
        """What was kept, or what an earlier encoding of the same step has left of it."""
        latest = (self._pending if self._has_pending else self._kept)[name]
        return self._read(latest).view_as(like)

    def _next(self, name: str, like: Tensor) -> Tensor:
        return self._pending[name].view_as(like)


class Residual(Memory):
    """Error feedback: x = g + e is encoded, and what that loses is kept, e' = x - C(x).

    So sum C(x) + e = sum g (Karimireddy et al. 2019, algorithm 1). With a rate b below 1 it is a
    moving average, e' = (1 - b) e + b (x - C(x)), and sum C(x) + e / b = sum g (Xie et al. 2024,
    "LoCo").

    Args:
        rate: b, in (0, 1].
    """

    names: ClassVar[tuple[str, ...]] = ("residual",)

    def __init__(self, numel: int, device: torch.device, rate: float = 1.0) -> None:
        super().__init__(numel, device)
        self.rate = rate

    @override
    def compensate(self, rows: Tensor, scale: Tensor | None) -> None:
        residual = self._latest("residual", rows)
        if scale is None:
            rows.add_(residual)
        else:
            rows.addcmul_(residual, scale)

    @override
    def note_sent(
        self,
        rows: Tensor,
        codec: Codec,
        wire: Tensor,
        generator: Generator | None,
        scale: Tensor | None,
    ) -> None:
        # In a later round of a step both are the same memory, so that what was there is read first.
        before, after = self._decayed(rows), self._next("residual", rows)
        # From the bytes, as receivers do: what counts as sent is what they get, to the bit.
        codec.decode(wire, after, generator)
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
        self._write(self._pending["residual"], lost.view(-1))
        self._has_pending = True


class ShortResidual(Residual):
    """The same in 8 bits: what is kept is rounded once more, and that error is lost for good."""

    _codec: ClassVar[Int8] = Int8()

    @override
    def _zeros(self, numel: int, device: torch.device) -> Tensor:
        self._numel = numel
        num_bytes = self._codec.wire_bytes(numel)
        return torch.zeros((1, num_bytes), dtype=torch.uint8, device=device)

    @override
    def _read(self, stored: Tensor) -> Tensor:
        rows = torch.empty((1, self._numel), dtype=torch.float32, device=stored.device)
        self._codec.decode(stored, rows)
        return rows[0]

    @override
    def _write(self, stored: Tensor, flat: Tensor) -> None:
        self._codec.encode(flat.reshape(1, -1), stored)

    @override
    def _next(self, name: str, like: Tensor) -> Tensor:
        return torch.empty_like(like)


class RunningMean(Memory):
    """Signum's: m' = momentum m + (1 - momentum) g is encoded (Bernstein et al. 2018).

    Args:
        momentum: In [0, 1).
    """

    names: ClassVar[tuple[str, ...]] = ("running_mean",)

    def __init__(self, numel: int, device: torch.device, momentum: float) -> None:
        super().__init__(numel, device)
        self._momentum = momentum

    @override
    def compensate(self, rows: Tensor, scale: Tensor | None) -> None:
        # Gradients that come in several rounds of one step add up.
        decay = 1.0 if self._has_pending else self._momentum
        before, mean = self._latest("running_mean", rows), self._next("running_mean", rows)
        torch.mul(before, decay, out=mean)
        gradients = rows if scale is None else rows.div_(scale)
        rows.copy_(mean.add_(gradients, alpha=1 - self._momentum))
        if scale is not None:
            rows.mul_(scale)
        self._has_pending = True


class Velocity(Memory):
    """DGC's: u = momentum u + g, v = v + u is encoded, and both become 0 where v was sent.

    Momentum correction and momentum factor masking (Lin et al. 2018, 3.2 and 3.3).

    Args:
        momentum: In [0, 1).
    """

    names: ClassVar[tuple[str, ...]] = ("momentum", "residual")

    def __init__(self, numel: int, device: torch.device, momentum: float) -> None:
        super().__init__(numel, device)
        self._momentum = momentum

    @override
    def compensate(self, rows: Tensor, scale: Tensor | None) -> None:
        is_first, momentum = not self._has_pending, self._next("momentum", rows)
        waiting = self._next("residual", rows)
        gradients = rows if scale is None else rows.div_(scale)
        if is_first:
            torch.mul(self._latest("momentum", rows), self._momentum, out=momentum)
            torch.add(self._latest("residual", rows), momentum, out=waiting)
        # Gradients that come in several rounds of one step add up.
        momentum.add_(gradients)
        waiting.add_(gradients)
        self._has_pending = True
        rows.copy_(waiting) if scale is None else torch.mul(waiting, scale, out=rows)

    @override
    def note_sent(
        self,
        rows: Tensor,
        codec: Codec,
        wire: Tensor,
        generator: Generator | None,
        scale: Tensor | None,
    ) -> None:
        if not isinstance(codec, DGC):
            # A dense step is one of SGD with momentum.
            self._next("residual", rows).zero_()
            return
        sent = torch.empty_like(rows, dtype=torch.bool)
        codec.sent_mask(wire, sent)
        for name in self.names:
            self._next(name, rows).masked_fill_(sent, 0.0)


def worker_memory(codec: Compressor, numel: int, device: torch.device) -> Memory:
    """What a rank keeps of its own gradients, which it encodes for their owners."""
    if isinstance(codec, DGC):
        return Velocity(numel, device, codec.momentum)
    if isinstance(codec, Signum):
        return RunningMean(numel, device, codec.momentum)
    return owner_memory(codec, numel, device)


def owner_memory(codec: Compressor, numel: int, device: torch.device) -> Memory:
    """What an owner keeps of the mean, which it encodes for everybody."""
    if not codec.has_feedback or isinstance(codec, Fp32):
        return Memory(numel, device)
    if isinstance(codec, LoCo):
        kind = ShortResidual if codec.residual_bits == 8 else Residual
        return kind(numel, device, codec.rate)
    return Residual(numel, device)
