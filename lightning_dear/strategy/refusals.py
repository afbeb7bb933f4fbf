"""What `strategy="dear"` refuses, and what to do instead: checked before training starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from difflib import get_close_matches
from inspect import signature
from itertools import zip_longest
from numbers import Real
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.plugins import precision as fabric_precision
from lightning.pytorch.plugins import precision as trainer_precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import device
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_dear import private_names
from lightning_dear.callbacks.fusion_tuner import option_of
from lightning_dear.collectives.store import from_all_ranks
from lightning_dear.compression import class_with
from lightning_dear.engine.module_tree import ignored_names
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.names import is_meant
from lightning_dear.planning import FusionPlanner, SearchingPlanner
from lightning_dear.planning.search import PredictingPlanner

_INSTEAD = {
    "ddp_comm_hook": "use compressor=",
    "mixed_precision": "use Trainer(precision=...)",
    "device_ids": "use Trainer(devices=...)",
    "output_device": "use Trainer(devices=...)",
    "bucket_cap_mb_list": "use fusion=",
    "forward_sync_buffers": "use broadcast_buffers=",
    # Of ours, and taken by the Trainer's strategy.
    "compression_schedule": "it needs a Trainer, which counts steps",
    "decouple": "it needs a Trainer",
    "gradients_in_hooks": "it needs a Trainer, which has hooks; see strategy.whole_gradients()",
    "save_distributed_checkpoint": "it needs a Trainer; fabric.save writes one file",
}


def checked_options(create: Callable[..., None], given: Mapping[str, Any]) -> dict[str, Any]:
    """Refuses options of `DDPStrategy` that cannot apply, unknown ones, and values of other kinds.

    Names of compressors and planners are not checked here.

    Args:
        create: A strategy's `__init__`: its annotations say what each option takes.
        given: Its arguments by name, before any other local variable; in `ddp_options` all that
            are not its own.

    Returns:
        The strategy's own options by name.

    Raises:
        ValueError: Naming each option that does not apply, why, and what it may have been meant to
            be. For an unknown name, with a list of the valid ones.
        TypeError: For a value of another kind, naming the option and what it takes.
    """
    own, others = signature(create).parameters, given["ddp_options"]
    if others:
        what = "; ".join(f"{one} ({_INSTEAD.get(one) or _guess(one, own)})" for one in others)
        raise ValueError(
            f"strategy='dear' does not take {what}. Leave it out, or use strategy='ddp'."
        )
    for option, hint in get_type_hints(create).items():
        takes = get_args(hint) or (hint,)
        # Compressors and planners are looked up by name later, which refuses unknown names.
        if option in given and not {str, Any} & {*takes}:
            _check_value(option, given[option], takes, create.__annotations__[option])
    return {name: given[name] for name in own if name in given and name != "self"}


def _check_value(option: str, value: Any, takes: Sequence[Any], words: str) -> None:
    names = [one for part in takes for one in get_args(part) or (part,) if isinstance(one, str)]
    kinds = [Real if one is float else get_origin(one) or one for one in takes]
    if isinstance(value, bool):
        # Elsewhere it would count as a number.
        kinds = [one for one in kinds if one is bool]
    if isinstance(value, list) and not all(isinstance(one, device) for one in value):
        kinds = []
    if isinstance(value, timedelta) and value <= timedelta(0):
        raise ValueError(f"{option} must be more than 0, got {value}.")
    if value in names or isinstance(value, tuple(one for one in kinds if isinstance(one, type))):
        return
    if names:
        valid = ", ".join(names) + (", or None" if NoneType in takes else "")
        meant = is_meant(str(value), names)
        raise ValueError(f"Unknown {option} {value!r}; valid names: {valid}.{meant}")
    raise TypeError(f"{option} must be {words.replace(' |', ' or')}, got {value!r}.")


def _guess(option: str, own: Iterable[str]) -> str:
    if any(option in signature(one).parameters for one in (DDPStrategy, DistributedDataParallel)):
        return "it is of DistributedDataParallel, which is not used"
    if (kind := class_with(option)) is not None:
        return (
            "unknown option; compressors have it: compressor="
            f"lightning_dear.compression.{kind.__name__}({option}=...)"
        )
    close = get_close_matches(option, own, n=1)
    return f"unknown option; is {close[0]} meant?" if close else "unknown option"


def check_optimizers(
    optimizers: Sequence[Optimizer], precision: fabric_precision.Precision
) -> None:
    """Refuses optimizers that are none, or that cannot work with the precision.

    Raises:
        ValueError: Saying what to return from `configure_optimizers`.
    """
    if not optimizers or type(optimizers[0]).__name__ == private_names.MOCK_OPTIMIZER.name:
        raise ValueError(
            "strategy='dear' needs an optimizer, and configure_optimizers returned none."
        )
    has_scaler = getattr(precision, "scaler", None) is not None
    for optimizer in optimizers:
        if has_scaler and getattr(optimizer, private_names.AMP_SCALING.name, False):
            raise ValueError(
                f"{type(optimizer).__name__}(fused=True) unscales gradients itself, on each rank"
                " for its shard alone, so that an overflow on one rank would not be noticed on the"
                " others; with precision='16-mixed' use fused=False."
            )


def say_what_is_gathered(gather: str | None, options: ExchangeOptions) -> None:
    """Tells people that a compressor has chosen for them what costs memory."""
    if gather is None and options.is_of_gradients and options.compressor is not None:
        rank_zero_info(
            f"With compressor={options.compressor.name!r} every rank gets whole gradients instead"
            " of parameters, and has the whole optimizer state."
        )


def say_what_hosts_cost(pipeline: Pipeline) -> None:
    """Tells people what travels between hosts of several ranks."""
    collectives, options = pipeline.collectives, pipeline.options
    own, num_ranks = collectives.world.fewest_on_a_host, collectives.world.size
    if own == 1 or options.all_reduces:
        return
    layout = collectives.world.description
    is_of_hosts = options.ranks_together(collectives) > 1 or options.compressor is None
    if collectives.hops == 2 and is_of_hosts:
        rank_zero_info(f"{layout}: shards travel in two hops, within hosts and between them.")
        return
    if collectives.favors_all_reduce and pipeline.training.all_reduce_refusal is None:
        rank_zero_info(
            f"strategy='dear' all-reduces every bucket, as 'ddp' does: {layout} would send more in"
            " two halves, and two hops are not possible, which need as many ranks on each host, one"
            " after the other. Every rank keeps the whole optimizer state."
        )
        return
    rank_zero_warn(
        f"On {layout} up to {own * (num_ranks - own) / (num_ranks - 1):.1f} times as many bytes"
        " leave a host as a ring's all-reduce would send, before any compression: each rank's go"
        " straight to the owners of shards. Compare with strategy='ddp', or run one rank a host."
    )


_PRECISIONS = {
    getattr(plugins, name)
    for plugins in (fabric_precision, trainer_precision)
    for name in ("Precision", "DoublePrecision", "HalfPrecision", "MixedPrecision")
}


def check_precision(precision: fabric_precision.Precision) -> None:
    """Refuses precision plug-ins that replace layers or parameters.

    Raises:
        ValueError: Naming the plug-in and the precisions that work.
    """
    if type(precision) not in _PRECISIONS:
        raise ValueError(
            f"{type(precision).__name__} (precision={precision.precision!r}) does not work under"
            " strategy='dear': it keeps layers or parameters of its own, which cannot be sharded."
            " Use '32-true', 'bf16-mixed', '16-mixed', 'bf16-true', '16-true' or '64-true', or"
            " strategy='ddp'."
        )


def check_writer_of_folders(checkpoint_io: CheckpointIO) -> None:
    """Refuses plug-ins that write otherwise than torch, where the strategy writes folders itself.

    Raises:
        ValueError: Naming the plug-in.
    """
    if not isinstance(checkpoint_io, TorchCheckpointIO):
        raise ValueError(
            "save_distributed_checkpoint=True writes folders itself and would not use"
            f" {type(checkpoint_io).__name__}; leave out one of them."
        )


def check_planner(fusion: FusionPlanner, options: ExchangeOptions) -> None:
    """Refuses planners that measure and predict what the strategy will not do.

    Raises:
        ValueError: Naming what to use.
    """
    if not isinstance(fusion, SearchingPlanner):
        return
    option, codec = option_of(fusion), options.compressor
    if options.all_reduces:
        what = "decouple=False" if codec is None else codec.name
        raise ValueError(
            f"{option} plans reduce-scatters and all-gathers, and {what} makes all-reduces instead."
            " Use fusion='threshold', 'none' or 'single' with it."
        )
    if options.is_scattered:
        assert codec is not None
        raise ValueError(
            f"{option} tries plans, and with each of them {codec.name} would begin with other"
            " thresholds and regions, and send other bytes. Use fusion='threshold', 'none' or"
            " 'single' with it."
        )
    if codec is not None and not getattr(fusion, "plans_for_codecs", False):
        raise ValueError(
            f"{option} plans from the time that gradients take as they are, and {codec.name}"
            " encodes them. Use fusion='mergecomp', which knows what that costs, 'bayesian', which"
            " measures, or 'threshold', 'none' or 'single' with it."
        )
    if isinstance(fusion, PredictingPlanner) and options.groups:
        raise ValueError(
            f"{option} plans with the costs of one compressor, and compressors= of the compression"
            " schedule has others for some parameters. Use fusion='threshold' with it."
        )


def check_module_states(module: Module) -> None:
    """Refuses ranks whose parameters or buffers differ in name, shape or dtype. Collective, blocks.

    Those that each rank has of its own are left out. Lazy layers are refused: they have no shape.

    To be called before rank 0's values are broadcast: a broadcast into tensors of another size ends
    a process at once, without a word.

    Raises:
        ValueError: On every rank alike, naming the first difference.
    """
    tensors, ignored = (*module.named_parameters(), *module.named_buffers()), ignored_names(module)
    own = {
        name: "" if is_lazy(one) else f"'{name}' (shape {tuple(one.shape)}, {one.dtype})"
        for name, one in tensors
        if name not in ignored
    }
    first, *others = reports = from_all_ranks(own)
    if lazy := [name for report in reports for name, words in report.items() if not words]:
        raise ValueError(
            f"'{lazy[0]}' has no shape yet: its layer is lazy. Run a dummy forward pass before"
            " training, which initializes it, as in the model's __init__:"
            " self.net(torch.zeros(1, ...))."
        )
    for rank, report in enumerate(others, start=1):
        pairs = zip_longest(first.values(), report.values(), fillvalue="no more tensors")
        for left, right in pairs:
            if left != right:
                raise ValueError(
                    f"Ranks hold different models: rank 0 has {left}, rank {rank} has {right}."
                    " Build the same model on every rank."
                )


_STEP_HOOKS = ("optimizer_step", "optimizer_zero_grad", "backward")


def why_not_early(
    trainer: pl.Trainer, optimizers: Sequence[Optimizer], readers: Mapping[str, Sequence[str]]
) -> str | None:
    """Says why no bucket may be stepped before backward has ended; None if it may.

    Args:
        trainer: Of the fit that begins.
        optimizers: All of them.
        readers: See `gradient_readers`.
    """
    module = trainer.lightning_module
    overridden = [hook for hook in _STEP_HOOKS if is_overridden(hook, module)]
    overridden += [f"{name}.{hook}" for hook, names in readers.items() for name in names]
    reasons = {
        "optimisation is manual": not module.automatic_optimization,
        "there are several optimizers": len(optimizers) > 1,
        "gradients are clipped": bool(trainer.gradient_clip_val),
        "losses are scaled": getattr(trainer.precision_plugin, "scaler", None) is not None,
        f"{', '.join(overridden)} may use the gradients": bool(overridden),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def warn_about_readers(readers: Mapping[str, Sequence[str]]) -> None:
    """Warns, once, that gradients are gathered for hooks that may look at them."""
    hooks = ", ".join(f"{name}.{hook}" for hook, names in readers.items() for name in names)
    rank_zero_warn(
        f"strategy='dear' gathers the mean gradient into .grad for {hooks}, which costs one more"
        " all-gather in every step. If .grad is not needed there, pass"
        " DearStrategy(gradients_in_hooks=False); strategy.grad_norm() and self.clip_gradients()"
        " work without it."
    )
