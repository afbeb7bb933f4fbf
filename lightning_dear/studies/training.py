"""One training, from fresh weights to the test; and a compressor with a deliberate bug."""

import hashlib
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_dear.compression import TopK
from lightning_dear.compression.error_feedback import Encoded, Memory, Residual
from lightning_dear.exchange.base import GradientsNotFinite
from lightning_dear.studies import block, competitors


class Recorder:
    """Records a training on this rank: the batches, loss, time and sent bytes of every step.

    Wraps the module's `training_step`. It is no callback because `strategy="dear"` gathers all
    parameters before it calls an unknown callback, and steps would take longer.

    Args:
        on_step: Called when a step's loss has been computed.
        sent_bytes: Returns the bytes sent so far; nan if unknown.

    Attributes:
        metrics: Test metrics over all ranks. None means that the training broke off, because
            gradients were not finite and could not be encoded.
        train_s: Seconds from the beginning of the first step to the end of `watching`; nan before.
    """

    def __init__(self, on_step: Callable[[], None], sent_bytes: Callable[[], float]) -> None:
        self._on_step = on_step
        self._sent_bytes = sent_bytes
        self._losses: list[Tensor] = []
        self._marks: list[tuple[float, float]] = []
        self._checksum = 0
        self.metrics: Mapping[str, float] | None = None
        self.train_s = float("nan")

    @property
    def steps(self) -> Tensor:
        """Figures of every step so far, [steps, 3] fp64 on the CPU.

        They are this rank's loss; seconds from the beginning of the first step until this step's
        loss was computed (on an accelerator, until it was launched, since the host does not wait);
        bytes sent since then, nan if unknown.
        """
        losses = torch.tensor([float(loss) for loss in self._losses], dtype=torch.float64)
        # The first mark is the beginning of the first step, so there is one mark more than losses.
        marks = torch.tensor(self._marks, dtype=torch.float64).reshape(-1, 2)
        return torch.cat([losses[:, None], marks[1 : len(losses) + 1] - marks[:1]], dim=1)

    @property
    def batches(self) -> str:
        """Digest of this rank's training batches so far, in order."""
        return f"{self._checksum:08x}"

    @contextmanager
    def watching(self, module: LightningModule) -> Iterator[None]:
        """Within, record every `training_step` of `module`, which is replaced and then restored."""
        inner = module.training_step

        @wraps(inner)
        def training_step(batch: Any, *others: Any) -> Any:
            if not self._marks:
                self._mark()
            for leaf in tree_leaves(batch):
                if isinstance(leaf, Tensor):
                    self._checksum = zlib.crc32(_bytes_of(leaf), self._checksum)
            output: Any = inner(batch, *others)
            self._mark()
            loss = output["loss"] if isinstance(output, Mapping) else output
            self._losses.append(loss.detach())
            self._on_step()
            return output

        module.training_step = training_step  # type: ignore[method-assign]
        try:
            yield
        finally:
            del module.training_step
            began_s = self._marks[0][0] if self._marks else float("nan")
            self.train_s = time.perf_counter() - began_s

    def _mark(self) -> None:
        sent_bytes = self._sent_bytes()
        self._marks.append((time.perf_counter(), sent_bytes))


def run_training(
    new_trainer: Callable[[], Trainer],
    module: LightningModule,
    datamodule: LightningDataModule,
    on_step: Callable[[], None] = lambda: None,
    sent_bytes: Callable[[], float] = lambda: float("nan"),
) -> Recorder:
    """Fit and test `module`; return what was recorded. Collective. Blocks.

    Args:
        new_trainer: Makes a trainer that does not save, log or validate.
        module: Module to train; it is mutated.
        datamodule: Data; an earlier training may have used it.
        on_step: Called in every step.
        sent_bytes: Returns the bytes that this rank has sent so far; nan if unknown.
    """
    recorder = Recorder(on_step, sent_bytes)
    with block.quiet_lightning():
        trainer = new_trainer()
        with suppress(GradientsNotFinite):
            with recorder.watching(module):
                trainer.fit(module, datamodule=datamodule)
            (recorder.metrics,) = trainer.test(module, datamodule=datamodule, verbose=False)
    competitors.forget_mesh(trainer.strategy)
    return recorder


def digest_of(module: LightningModule) -> str:
    """Return a digest of the bits of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(name.encode())
        digest.update(_bytes_of(tensor))
    return digest.hexdigest()[:12]


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


# --- a deliberate bug ---------------------------------------------------------------------------


class DoubledResidual(Residual):
    """Keeps twice the error, e' = 2 (x - C(x)), which violates the law of error feedback."""

    @override
    def note_sent(self, rows: Tensor, wire: Tensor, encoded: Encoded, scale: Tensor | None) -> None:
        super().note_sent(rows, wire, encoded, scale)
        self._next("residual", rows).mul_(2)


class DoubledTopK(TopK):
    """Top-k with this bug, as a control: training must end worse with it."""

    @override
    def owner_memory(self, numel: int, device: torch.device) -> Memory:
        return DoubledResidual(numel, device)
