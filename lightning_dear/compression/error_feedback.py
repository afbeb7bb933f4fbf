"""Error feedback: what encoding has left out is kept from step to step, and sent later.

A memory (class `Memory`) keeps up to two fp32 values, such as residual and momentum, for each
element that this rank encodes, in the order of the bucket's gradients. Encoding a bucket computes
new values, which are pending at first. When the optimizer has stepped, `commit` makes the pending
values the kept ones. If the step is left out, `discard` drops the pending values: after an overflow
under a loss scale, or if `zero_grad` was called instead of `step`. A compressor chooses its memory
(see `Compressor.worker_memory`).

Gradients may be multiplied by a loss scale. Kept values never are, so that the scale may change.
"""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Generator, Tensor
from typing_extensions import override


class Decodes(Protocol):
    """The part of a codec that error feedback uses to compute the values that receivers decode."""

    wire_dtype: ClassVar[torch.dtype | None]

    def decode(self, wire: Tensor, rows: Tensor, generator: Generator | None = None) -> None:
        """Decodes the bytes in `wire` and writes the values into `rows`: see `Codec.decode`."""


class Encoded(NamedTuple):
    """Holds how the bytes of one message were encoded, and decodes them.

    Attributes:
        codec: Codec that encoded the bytes.
        seed: Seed of the generator that `codec.encode` was given. None means that it was given no
            generator.
    """

    codec: Decodes
    seed: int | None = None

    def generator(self, device: torch.device) -> Generator | None:
        """Returns a new generator on `device`, in the state in which `codec.encode` got its own.

        Returns None if the codec was given no generator.
        """
        return None if self.seed is None else Generator(device).manual_seed(self.seed)

    def decode(self, wire: Tensor, rows: Tensor) -> None:
        """Decodes the bytes in `wire` and writes the values into `rows`; `wire` is not mutated."""
        self.codec.decode(wire, rows, self.generator(rows.device))


class Memory:
    """Keeps what a compressor needs from step to step; this base class keeps nothing.

    The base class itself is used for compressors that lose nothing, or whose errors are not kept:
    unbiased ones, votes without momentum, and error_feedback=False. An exchange has up to two
    memories for each bucket: one for what a rank encodes in the reduce half ("worker"), and one for
    the mean of this rank's shard, which it encodes in the gather half ("owner").

    Args:
        numel: Number of elements that are encoded: of the whole bucket, of a part of it, or of this
            rank's shard.
        device: Device of these elements.
        rate: Weight of the newest error in "residual", which is a moving average of errors, in
            (0, 1]. The stored residual is rate x the error that is still to be sent. 1 means plain
            feedback: the residual is the error itself.
        decay: The first of `names` is multiplied by this in each step, in [0, 1]: "residual", or
            momentum in subclasses that keep momentum. 1 keeps all of it.

    Attributes:
        names: Names of the kept tensors, such as "residual". Empty means that nothing is kept.
        kept: Name -> kept tensor, flat fp32, without pending changes. To be read and written
            between steps: each `commit` exchanges these tensors with the pending ones, which the
            next step overwrites.
        rate: Same as the argument.
        decay: Same as the argument.
    """

    names: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, numel: int, device: torch.device, rate: float = 1.0, decay: float = 1.0
    ) -> None:
        # Two tensors for each name: encoding writes the pending one, so that the kept one is
        # unchanged if the step is left out.
        zeros = partial(torch.zeros, numel, dtype=torch.float32, device=device)
        self.kept = {name: zeros() for name in self.names}
        self._pending = {name: zeros() for name in self.names}
        self._has_pending = False
        self.rate, self.decay = rate, decay

    def compensate(self, rows: Tensor, scale: Tensor | None) -> None:
        """Turns gradients into the values to encode, in place, such as by adding the residual.

        Does nothing in this base class.

        Args:
            rows: [R, numel / R] fp32, contiguous: gradients, multiplied by `scale`. Mutated, and
                still multiplied by `scale` afterwards.
            scale: Loss scale. None means 1.
        """

    def note_sent(self, rows: Tensor, wire: Tensor, encoded: Encoded, scale: Tensor | None) -> None:
        """Computes the error of encoding, `rows` minus decoded `wire`, and makes it pending.

        To be called once `rows` have been encoded. Does nothing in this base class.

        Args:
            rows: Values as `compensate` has left them; not mutated.
            wire: Encoded `rows`; not mutated.
            encoded: How `wire` was encoded; it decodes `wire`.
            scale: Loss scale that `compensate` was given.
        """

    def note_lost(self, lost: Tensor, scale: Tensor | None) -> None:
        """Makes the error `lost` pending, for compressors that do not encode row by row.

        Such a compressor calls this instead of `note_sent`. Does nothing in this base class.

        Args:
            lost: Error of each element, multiplied by `scale`, in the layout of `compensate`'s
                rows; not mutated.
            scale: Loss scale that `compensate` was given.
        """

    def commit(self) -> None:
        """Makes the pending values the kept ones. To be called once the optimizer has stepped.

        Does nothing if no values are pending.
        """
        if self._has_pending:
            # Swapped, not copied: the next encoding overwrites every element of the tensors that
            # were kept so far.
            self.kept, self._pending = self._pending, self.kept
        self._has_pending = False

    def discard(self) -> None:
        """Drops the pending values. To be called if the step is left out."""
        self._has_pending = False

    def keep(self, parts: Sequence[slice]) -> None:
        """Sets pending values back to the kept ones in some ranges of elements.

        For the elements of parameters that no rank has used in this step. Does nothing if no values
        are pending.
        """
        if self._has_pending:
            for name in self.names:
                for part in parts:
                    self._pending[name][part] = self.kept[name][part]

    def note_all_sent(self, but: Sequence[slice]) -> None:
        """Stores that all elements were sent uncompressed, the residual included, and commits.

        All kept tensors are multiplied by 1 - rate, so that with a rate of 1 they become 0. In the
        ranges `but`, which were not sent, they stay as they are. For memories that keep a residual
        and no momentum.
        """
        for name, kept in self.kept.items():
            torch.mul(kept, 1 - self.rate, out=self._pending[name])
        self._has_pending = True
        self.keep(but)
        self.commit()

    def add(self, part: slice, values: Tensor) -> None:
        """Adds `values` to what is still to be sent of the elements in the range `part`.

        Adds them to the pending residual, or to the kept one if none is pending. The values are
        lost if this memory keeps no residual.

        Args:
            part: Range of elements.
            values: Values without loss scale; not mutated.
        """
        if "residual" in self.names:
            self._now["residual"][part].add_(values, alpha=self.rate)

    @property
    def _now(self) -> dict[str, Tensor]:
        """Returns name -> pending tensor if values are pending, and otherwise the kept tensors.

        Values are pending from the first encoding of a step on. A step encodes a second time if
        gradients come after their bucket was sent.
        """
        return self._pending if self._has_pending else self.kept

    def _latest(self, name: str, like: Tensor) -> Tensor:
        """Returns the tensor `name` of `_now`, in the shape of `like`."""
        return self._now[name].view_as(like)

    def _next(self, name: str, like: Tensor) -> Tensor:
        """Returns the pending tensor `name`, to be overwritten, in the shape of `like`."""
        return self._pending[name].view_as(like)


class Residual(Memory):
    """Keeps the error of encoding, e. With g the gradient, x = g + e is encoded.

    Then e becomes x - C(x), where C(x) arrives. So over all steps sum C(x) + e = sum g: no gradient
    is lost (Karimireddy et al. 2019, algorithm 1). With a rate b below 1, e is a moving average: it
    becomes (1 - b) e + b (x - C(x)), and sum C(x) + e / b = sum g (Xie et al. 2024, "LoCo").

    With a decay a below 1, x = g + a e is encoded. Then a gradient fades while it waits, so that no
    more than 1 / (1 - a) gradients of about the same size arrive at once.
    """

    names: ClassVar[tuple[str, ...]] = ("residual",)

    @override
    def compensate(self, rows: Tensor, scale: Tensor | None) -> None:
        # The residual decays once a step: in the first round (see `_now`).
        decay = 1.0 if self._has_pending else self.decay
        residual = self._latest("residual", rows)
        if scale is None:
            rows.add_(residual, alpha=decay)
        else:
            rows.addcmul_(residual, scale, value=decay)

    @override
    def note_sent(self, rows: Tensor, wire: Tensor, encoded: Encoded, scale: Tensor | None) -> None:
        # If the step has encoded before, the old residual and the new one are the same tensor. So
        # the old residual is read before the new one is written.
        before, after = self._decayed(rows), self._next("residual", rows)
        # Decoded from the bytes, so that C(x) is equal to what receivers get, to the last bit.
        encoded.decode(wire, after)
        self._keep(torch.sub(rows, after, out=after), before, scale)

    @override
    def note_lost(self, lost: Tensor, scale: Tensor | None) -> None:
        before = self._decayed(lost)
        self._keep(self._next("residual", lost).copy_(lost), before, scale)

    def _decayed(self, like: Tensor) -> Tensor | None:
        """Returns a new tensor, (1 - rate) x the latest residual, in the shape of `like`.

        None means that it is 0, because the rate is 1.
        """
        return self._latest("residual", like) * (1 - self.rate) if self.rate < 1 else None

    def _keep(self, lost: Tensor, before: Tensor | None, scale: Tensor | None) -> None:
        """Turns the error `lost` into the new residual, in place, and marks it as pending.

        Args:
            lost: The pending tensor "residual", which holds the error, multiplied by `scale`.
            before: What `_decayed` returned.
            scale: Loss scale. None means 1.
        """
        if scale is not None:
            lost.div_(scale)
        if before is not None:
            lost.mul_(self.rate).add_(before)
        self._has_pending = True
