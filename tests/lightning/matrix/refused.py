"""What is refused: on every rank alike, in a sentence with the remedy."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import nn

from lightning_dear import DearStrategy
from tests.lightning.fitting import dear, fit
from tests.lightning.matrix.refused_models import OPTIMIZERS, UntouchedNet, sgd
from tests.lightning.matrix.rows import Refused
from tests.lightning.nets import Net

NO_DDP = "leave it out"
row = partial(Refused, section="Options")
plugin = partial(Refused, section="Precision")
checkpointing = partial(Refused, section="Checkpoints")


def _construct(**options: Any) -> None:
    DearStrategy(**options)


# Stand-ins: Lightning's own need packages, or a GPU, before the strategy can refuse them.
class TransformerEnginePrecision(Precision):
    """Under Lightning's name."""

    precision = "transformer-engine"


class BitsandbytesPrecision(Precision):
    """Under Lightning's name."""

    precision = "nf4"


def _fit_with_plugin(kind: type[Precision]) -> None:
    fit(dear(precision_plugin=kind()), UntouchedNet(sgd))


def _fused(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), fused=True)


def _fit_fused_with_scaler() -> None:
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    fit(dear(precision_plugin=scaled), UntouchedNet(_fused))


def _fit_with_batch_size_finder() -> None:
    fit(dear(), UntouchedNet(sgd), BatchSizeFinder())


def _ddp_option(option: str, value: Any, why: str, instead: str = NO_DDP) -> Refused:
    return row(
        name=option,
        run=partial(_construct, **{option: value}),
        message=f"does not take {option}",
        why=why,
        instead=instead,
    )


OPTIONS = (
    row(
        name="unknown compressor",
        run=partial(_construct, compressor="topkk"),
        message="Unknown compressor 'topkk'; valid names: none",
        why="a wrong name would train without it",
        instead="one of the names in the message",
    ),
    row(
        name="unknown fusion",
        run=partial(_construct, fusion="thresh"),
        message="Unknown fusion 'thresh'; valid names: threshold, none, single",
        why="a wrong name would train without it",
        instead="one of the names in the message",
    ),
    row(
        name="unknown gather",
        run=partial(_construct, gather="weights"),
        message="Unknown gather 'weights'; valid names: parameters, gradients",
        why="a wrong name would train without it",
        instead="one of the names in the message",
    ),
    *(
        row(
            name=f"bucket_cap_mb={cap}",
            run=partial(_construct, bucket_cap_mb=cap),
            message=f"bucket_cap_mb must be > 0 MiB, got {cap}",
            why="no bucket has that size",
            instead="a positive number of MiB",
        )
        for cap in (0, -1.0, float("nan"))
    ),
    row(
        name="bucket_cap_mb without threshold fusion",
        run=partial(_construct, fusion="single", bucket_cap_mb=4),
        message="bucket_cap_mb=4 has no effect with fusion=",
        why="it would be ignored",
        instead="leave out one of the two",
    ),
    _ddp_option("ddp_comm_hook", print, "it hooks DistributedDataParallel", "`compressor=`"),
    _ddp_option("static_graph", True, "the first step is always recorded"),
    _ddp_option("gradient_as_bucket_view", True, "gradients always lie in buckets"),
    _ddp_option("model_averaging_period", 4, "weights are equal on all ranks after every step"),
    row(
        name="unknown option",
        run=partial(_construct, bucket_cap=4),
        message="does not take bucket_cap (unknown option; is bucket_cap_mb meant?)",
        why="it would be ignored",
        instead="docs/options.md",
    ),
    row(
        name="BatchSizeFinder",
        run=_fit_with_batch_size_finder,
        message="The Batch size finder is not supported with distributed strategies.",
        why="Lightning refuses it under every distributed strategy",
        instead="search on one device",
        error="MisconfigurationException",
    ),
)


def _fit_folders_with_plugin() -> None:
    strategy = dear(save_distributed_checkpoint=True, checkpoint_io=AsyncCheckpointIO())
    fit(strategy, UntouchedNet(sgd))


def _load_format(number: int) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "newer.ckpt"
        trainer = fit(dear(), Net("mlp"), max_steps=1)
        trainer.save_checkpoint(path)
        dist.barrier()
        if trainer.is_global_zero:
            _raise_format(path, number)
        path = Path(trainer.strategy.broadcast(str(path)))
        fit(dear(), UntouchedNet(sgd), ckpt_path=str(path), max_epochs=2)


def _raise_format(path: Path, number: int) -> None:
    checkpoint = torch.load(path, weights_only=True)
    assert "format" in checkpoint["lightning_dear"]
    checkpoint["lightning_dear"]["format"] = number
    torch.save(checkpoint, path)


CHECKPOINTS = (
    checkpointing(
        name="save_distributed_checkpoint with a checkpoint plug-in",
        run=_fit_folders_with_plugin,
        message="save_distributed_checkpoint=True writes folders itself",
        why="the plug-in would not be used",
        instead="leave out one of the two",
    ),
    checkpointing(
        name="a checkpoint of an unknown format",
        run=partial(_load_format, 99),
        message="The checkpoint has lightning_dear format 99, and this version reads",
        why="a newer version may have written it",
        instead="upgrade lightning-dear",
    ),
)

PRECISIONS = (
    plugin(
        name="a fused optimizer with GradScaler",
        run=_fit_fused_with_scaler,
        message="unscales gradients itself",
        why="each rank would see overflows of its own shard alone",
        instead="`fused=False`",
    ),
    plugin(
        name="TransformerEngine (FP8)",
        run=partial(_fit_with_plugin, TransformerEnginePrecision),
        message="TransformerEnginePrecision",
        why="its layers keep casts of weights, which would go stale",
        instead="`bf16-mixed` or `bf16-true`",
    ),
    plugin(
        name="bitsandbytes",
        run=partial(_fit_with_plugin, BitsandbytesPrecision),
        message="BitsandbytesPrecision",
        why="its parameters are not floating-point numbers",
        instead="`bf16-true`",
    ),
)

REFUSED_ROWS = (*OPTIMIZERS, *PRECISIONS, *CHECKPOINTS, *OPTIONS)
