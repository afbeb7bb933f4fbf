"""Checks before training, and raises for what `strategy="dear"` does not support."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from difflib import get_close_matches
from inspect import signature
from itertools import zip_longest
from numbers import Real
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from lightning.fabric import plugins as fabric_plugins
from lightning.pytorch import LightningModule, plugins, strategies
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import device
from torch.nn import Module, parallel, parameter
from torch.optim import SGD, Optimizer

from lightning_dear import planning, private_names
from lightning_dear.callbacks.fusion_tuner import option_of
from lightning_dear.collectives import staged, store
from lightning_dear.compression import Compressor, SparseAllReduce, class_of, class_with
from lightning_dear.compression.codec import FewOfMany
from lightning_dear.compression.groups import Groups
from lightning_dear.engine.module_tree import ignored_names
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.engine.training import Training
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.names import is_meant
from lightning_dear.tuning.host_path import measure_host_path

_INSTEAD = {
    "ddp_comm_hook": "use compressor=",
    "mixed_precision": "use Trainer(precision=...)",
    "device_ids": "use Trainer(devices=...)",
    "output_device": "use Trainer(devices=...)",
    "bucket_cap_mb_list": "use fusion=",
    "forward_sync_buffers": "use broadcast_buffers=",
    # Options of `DearStrategy` that Fabric's strategy does not take.
    "compression_schedule": "it needs a Trainer, which counts steps",
    "decouple": "it needs a Trainer",
    "elastic": "it needs a Trainer, whose handler of SIGTERM it uses",
    "split": "it needs a Trainer, whose loaders it cuts",
    "save_distributed_checkpoint": "it needs a Trainer; fabric.save writes one file",
}

_SHARES = ("ratio", "compress_ratio", "compression_ratio", "fraction", "keep_ratio")
"""Names that other packages give to the share of numbers that is sent, our `density`."""


def checked_options(create: Callable[..., None], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a strategy's own options, and raises for unknown options and values of wrong types.

    Names of compressors and planners are not checked here.

    Args:
        create: The strategy's `__init__`, whose annotations say which values each option takes.
        given: `locals()` of that `__init__`, called before it has made a variable. Its
            `ddp_options` holds the options that the strategy does not have.

    Returns:
        Name -> value of the strategy's own options.

    Raises:
        ValueError: If an option does not apply or is unknown. The message says why, and what may be
            meant. If a value is no valid name, with a list of the valid names. If a time is not
            more than 0.
        TypeError: If a value has a wrong type. The message names the option and what it takes.
    """
    own, others = signature(create).parameters, given["ddp_options"]
    if others:
        what = "; ".join(
            f"{one} ({_INSTEAD.get(one) or _guess(one, given, own)})" for one in others
        )
        raise ValueError(f"strategy='dear' does not take {what}. Write the right name, or omit it.")
    for option, hint in get_type_hints(create).items():
        takes = get_args(hint) or (hint,)
        # Compressors and planners are looked up by name later, which refuses unknown names.
        if option in given and not {str, Any} & {*takes}:
            _check_value(option, given[option], takes)
    return {name: given[name] for name in own if name in given and name != "self"}


def check_weights(weights: str | None, codec: Compressor | None, groups: Groups) -> None:
    """Raises a ValueError if batches have weights and a compressor votes."""
    codecs = codec, *(one for _, one in groups)
    voting = [one.name for one in codecs if one is not None and one.votes]
    if weights is not None and voting:
        raise ValueError(
            f"weights={weights!r}, which split= implies, is not for"
            f" compressor={voting[0]!r}: each rank has one vote, whatever its number of samples."
            " Use another compressor, such as 'int8'."
        )


def _check_value(option: str, value: Any, takes: Sequence[Any]) -> None:
    names = [one for part in takes for one in get_args(part) or (part,) if isinstance(one, str)]
    kinds = [Real if one is float else get_origin(one) or one for one in takes]
    if isinstance(value, bool):
        # bool is a subclass of int, so that True would pass for a number.
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
    words = [str(one).replace("torch.", "") if get_args(one) else one.__name__ for one in takes]
    said = " or ".join(words).replace("NoneType", "None")
    such = ", such as timedelta(minutes=10)" if timedelta in takes else ""
    raise TypeError(f"{option} must be {said}, got {value!r}{such}.")


def _guess(option: str, given: Mapping[str, Any], own: Iterable[str]) -> str:
    ddp = strategies.DDPStrategy, parallel.DistributedDataParallel
    if any(option in signature(one).parameters for one in ddp):
        return "it is of DistributedDataParallel: needs strategy='ddp'"
    value, kind = given["ddp_options"][option], class_of(given["compressor"])
    takes = () if kind is None else tuple(signature(kind).parameters)
    name = option
    if option in _SHARES and "density" in takes and isinstance(value, float) and value <= 1:
        name = "density"
    if name not in takes and (other := class_with(option)) is not None:
        kind, takes = other, (option,)
    if kind is not None and name in takes:
        made = f"compressor={kind.__name__}({name}={value!r})"
        return f"unknown option; write {made}, with {kind.__name__} of lightning_dear.compression"
    if close := get_close_matches(option, own, n=1):
        return f"unknown option; is {close[0]} meant?"
    valid = ", ".join(name for name in own if name not in ("self", "ddp_options"))
    theirs = f"{kind.__name__}(...) takes {', '.join(takes)}; " if kind is not None else ""
    return f"unknown option; {theirs}valid here: {valid}"


def check_optimizers(optimizers: Sequence[Optimizer], precision: fabric_plugins.Precision) -> None:
    """Refuses a training without optimizers, and `fused=True` optimizers with a GradScaler.

    Args:
        optimizers: The optimizers that `configure_optimizers` has returned.
        precision: Precision plug-in of the trainer.

    Raises:
        ValueError: In both cases.
    """
    if not optimizers or type(optimizers[0]).__name__ == private_names.MOCK_OPTIMIZER.name:
        raise ValueError("strategy='dear' needs an optimizer. Return it from configure_optimizers.")
    has_scaler = getattr(precision, "scaler", None) is not None
    for optimizer in optimizers:
        if has_scaler and getattr(optimizer, private_names.AMP_SCALING.name, False):
            raise ValueError(
                f"{type(optimizer).__name__}(fused=True) unscales gradients itself, which does not"
                " work with precision='16-mixed'. Use fused=False. Each rank unscales only its own"
                " shard, and would not notice an overflow in the shards of other ranks."
            )


def say_what_is_gathered(gather: str | None, options: ExchangeOptions) -> None:
    """Tells the user on rank 0 that the compressor makes ranks gather gradients, at a memory cost.

    Says nothing if the user has set `gather`, if parameters are gathered, or without a compressor.
    """
    if gather is None and options.is_of_gradients and options.compressor is not None:
        rank_zero_info(
            f"With compressor={options.compressor.name!r} every rank gets whole gradients instead"
            " of parameters, and has the whole optimizer state."
        )


def say_what_waits(
    options: ExchangeOptions, optimizers: Sequence[Optimizer], num_ranks: int
) -> None:
    """Tells the user on rank 0 how late and how large numbers arrive, and what that asks of SGD.

    Says nothing if the compressor sends all numbers, or loses those that it does not send.

    Args:
        options: Options with the compressor.
        optimizers: The user's optimizers. Options of their first groups are named.
        num_ranks: Number of ranks. With one, a sparse all-reduce sends nothing, and nothing waits.
    """
    codec = options.compressor
    if isinstance(codec, SparseAllReduce) and num_ranks == 1:
        return
    if not isinstance(codec, FewOfMany) or not codec.has_feedback or codec.density > _MOST_DENSE:
        return
    steps = dict.fromkeys(_steps_on(codec, one) for one in optimizers)
    rank_zero_info(
        f"With compressor={codec.name!r} training learns more slowly at first: with"
        f" density={codec.density:g} an average number of a gradient waits about"
        f" {_short(1 / codec.density)} steps. {' '.join(steps)}"
    )


_MOST_DENSE = 0.5
"""With a larger density an average number waits less than 2 steps."""


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"


def _steps_on(codec: FewOfMany, optimizer: Optimizer) -> str:
    """Returns sentences on how large the optimizer's steps are where a number arrives."""
    name, group = type(optimizer).__name__, optimizer.param_groups[0]
    times = _short(codec.gradients_at_once)
    has_faded = codec.gradients_at_once < 1 / codec.density
    comes = f"It comes as a sum of about {times} gradients{' (older ones have faded)' * has_faded}"
    if not isinstance(optimizer, SGD):
        same = f". The steps of {name} do not grow with it" if "betas" in group else ""
        return f"{comes}{same}."
    momentum = group["momentum"] or getattr(codec, "momentum", 0.0)
    gain = _short((1 - group["dampening"]) / (1 - momentum)) if 0 < momentum < 1 else ""
    return (
        f"{comes}: a step of {name} that is {times} times as large"
        f"{gain and f', and momentum={momentum:g} makes it {gain} times that'}. If the loss rises,"
        f" divide lr={float(group['lr']):g} by up to {times}{gain and ', lower momentum'}, or set a"
        " larger density."
    )


def say_what_staging_costs(pipeline: Pipeline) -> None:
    """Rank 0 says what a step's messages take through the host, and over NCCL. Collective. Blocks.

    Says nothing, and measures nothing, unless messages of a device travel through the host.
    """
    collectives = pipeline.collectives
    if isinstance(collectives, staged.StagedCollectives):
        nbytes = sum(one.nbytes for part in pipeline.parts for one in part.parameters)
        path = measure_host_path(collectives, collectives.streams, nbytes)
        rank_zero_info(path.described(nbytes, collectives.world.size))


def say_what_hosts_cost(pipeline: Pipeline) -> None:
    """Tells or warns the user, on rank 0, how much is sent between hosts with several ranks each.

    Says nothing if there is one host, if a host has one rank, or if every bucket is all-reduced by
    the options.
    """
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
            " two halves. Two hops need equally many ranks on each host, numbered one after the"
            " other. Every rank keeps the whole optimizer state."
        )
        return
    rank_zero_warn(
        f"On {layout} up to {own * (num_ranks - own) / (num_ranks - 1):.1f} times as many bytes"
        " leave a host as a ring's all-reduce would send, before any compression. Compare with"
        " strategy='ddp', or run one rank a host. Each rank sends directly to the shards' owners."
    )


_PRECISIONS = {
    getattr(package, name)
    for package in (fabric_plugins.precision, plugins.precision)
    for name in ("Precision", "DoublePrecision", "HalfPrecision", "MixedPrecision")
}


def check_precision(precision: fabric_plugins.Precision) -> None:
    """Refuses precision plug-ins that may replace layers or parameters.

    Raises:
        ValueError: If the class of `precision` is none of Lightning's plug-ins for full, double,
            half and mixed precision. The message names the precisions that work.
    """
    if type(precision) not in _PRECISIONS:
        raise ValueError(
            f"{type(precision).__name__} (precision={precision.precision!r}) does not work under"
            " strategy='dear'. Use '32-true', 'bf16-mixed', '16-mixed', 'bf16-true', '16-true' or"
            " '64-true', or strategy='ddp': it keeps layers or parameters of its own, which cannot"
            " be sharded."
        )


def check_writer_of_folders(checkpoint_io: fabric_plugins.CheckpointIO) -> None:
    """Refuses a plug-in for writing checkpoints, since the strategy writes folders itself.

    Raises:
        ValueError: If `checkpoint_io` is no `TorchCheckpointIO`, which is the default.
    """
    if not isinstance(checkpoint_io, fabric_plugins.TorchCheckpointIO):
        raise ValueError(
            "save_distributed_checkpoint=True writes folders itself and would not use"
            f" {type(checkpoint_io).__name__}. Leave out one of them."
        )


def check_planner(fusion: planning.FusionPlanner, options: ExchangeOptions) -> None:
    """Refuses planners whose measurements or predictions do not fit the exchange options.

    Planners that measure nothing always pass.

    Args:
        fusion: Planner of the buckets.
        options: The exchange options.

    Raises:
        ValueError: If they do not fit. The message names planners that do.
    """
    if not isinstance(fusion, planning.search.SearchingPlanner):
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
            f"{option} cannot be used with {codec.name}. Use fusion='threshold', 'none' or 'single'"
            f" with it. {option} compares plans by their times, and with each plan {codec.name}"
            " would begin with other thresholds and regions, and send other bytes."
        )
    if codec is not None and not getattr(fusion, "plans_for_codecs", False):
        raise ValueError(
            f"{option} plans from the time that uncompressed gradients take, and {codec.name}"
            " encodes them. Use fusion='mergecomp', which counts the cost of encoding, 'bayesian',"
            " which measures whole steps, or 'threshold', 'none' or 'single'."
        )
    if isinstance(fusion, planning.search.PredictingPlanner) and options.groups:
        raise ValueError(
            f"{option} plans with the costs of one compressor, and compressor={{...}} has others"
            " for some parameters. Use fusion='threshold' with it."
        )


def check_module_states(module: Module) -> None:
    """Refuses lazy layers, and ranks whose tensors differ in name, shape or dtype.

    Collective. Blocks. Compares parameters and buffers, but not those that the module lists for DDP
    to ignore. Call it before rank 0's values are broadcast: a broadcast into a tensor of another
    size ends the process without a message.

    Raises:
        ValueError: On every rank. The message names the first difference.
    """
    tensors, ignored = (*module.named_parameters(), *module.named_buffers()), ignored_names(module)
    own = {
        name: "" if parameter.is_lazy(one) else f"'{name}' (shape {tuple(one.shape)}, {one.dtype})"
        for name, one in tensors
        if name not in ignored
    }
    first, *others = reports = store.from_all_ranks(own)
    if lazy := [name for report in reports for name, words in report.items() if not words]:
        raise ValueError(
            f"'{lazy[0]}' has no shape yet: its layer is lazy. Run a forward pass before"
            " training, which gives it a shape, such as self.net(torch.zeros(1, ...)) in the"
            " model's __init__."
        )
    for rank, report in enumerate(others, start=1):
        pairs = zip_longest(first.values(), report.values(), fillvalue="no more tensors")
        for left, right in pairs:
            if left != right:
                raise ValueError(
                    f"Ranks hold different models: rank 0 has {left}, rank {rank} has {right}."
                    " Build the same model on every rank."
                )


def warn_about_backward(training: Training, module: LightningModule) -> None:
    """Warns on rank 0 if the module overrides `backward`, whose code finds no gradients."""
    if training.uses_buckets and is_overridden("backward", module):
        rank_zero_warn(
            f"{type(module).__name__} overrides backward. Code in it that reads or clips .grad must"
            " move to on_after_backward, or to configure_gradient_clipping: in backward .grad is"
            " None, since gradients are in buckets on their way to other ranks."
        )


def warn_about_readers(readers: Mapping[str, Sequence[str]]) -> None:
    """Warns on rank 0 that gradients are gathered for hooks, at one more all-gather a step.

    Args:
        readers: Hook -> classes that override it, for the message.
    """
    hooks = ", ".join(f"{name}.{hook}" for hook, names in readers.items() for name in names)
    rank_zero_warn(
        f"strategy='dear' gathers the mean gradient into .grad for {hooks}, which costs one more"
        " all-gather in every step. If .grad is not needed there, pass"
        " DearStrategy(gradients_in_hooks=False). Without it strategy.grad_norm() and"
        " self.clip_gradients() still work."
    )
