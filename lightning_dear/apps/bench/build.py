"""Builds the models, strategies and trainers of a comparison, and describes its points."""

import signal
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from hydra.utils import instantiate
from lightning.pytorch import LightningModule, Trainer
from omegaconf import DictConfig, OmegaConf, open_dict

from lightning_dear.apps import checks, job
from lightning_dear.apps.bench.config import as_override
from lightning_dear.apps.program import Program
from lightning_dear.emulation import emulated_rig
from lightning_dear.local_steps import LocalSteps
from lightning_dear.planning import BucketPlan, FixedPlan, fusion
from lightning_dear.strategy.launchers import configure_launcher
from lightning_dear.studies import block, competitors, files, interrupts
from lightning_dear.studies.report import Report
from lightning_dear.workloads.replay import ReplayModel, load_profile

_CAPS = ("bucket_cap_mb", "first_bucket_cap_mb", "min_cap_mb", "max_cap_mb")
"""Options, in MiB, that limit the size of a bucket."""

_ITEMSIZES = {"bf16-true": 2, "16-true": 2, "64-true": 8}
"""Trainer precision -> bytes of an element. Other precisions keep the size of the model's dtype."""


def build_model(cfg: DictConfig) -> LightningModule:
    """Build a fresh model."""
    model: LightningModule = instantiate(cfg.model, _convert_="all")
    return model


def build_strategy(cfg: DictConfig, plan: BucketPlan | None = None) -> Any:
    """Build a fresh strategy.

    Args:
        cfg: Config of an entry.
        plan: Plan whose buckets the strategy must use. None means that the strategy plans itself.

    Raises:
        ValueError: For ``strategy=single``, which every comparison measures anyway.
    """
    if not OmegaConf.is_config(cfg.strategy):
        raise ValueError(
            "strategy=single is no entry of a comparison. Leave it out of entries. Every comparison"
            " has a row in which each rank trains alone (compute alone)."
        )
    strategy = instantiate(cfg.strategy, _convert_="all", _partial_=True)
    if plan is None:
        return strategy()
    options = competitors.ddp_options(plan) if is_ddp(cfg) else {"fusion": FixedPlan(plan)}
    return strategy(**options)


def is_ddp(cfg: DictConfig) -> bool:
    """Whether the strategy wraps the module in DistributedDataParallel."""
    return str(cfg.strategy._target_).endswith("DDPStrategy")


def round_of(cfg: DictConfig) -> int:
    """Return the steps of a round of the entry's local steps; 1 without local steps.

    Raises:
        ValueError: If the steps are found while it trains.
    """
    if (steps := cfg.strategy.get("local_steps")) == "auto":
        raise ValueError(
            "dear-bench measures whole rounds, and strategy.local_steps=auto finds their length"
            " late. Train once with auto, and give dear-bench the number that it prints."
        )
    return int(steps.get("every", LocalSteps().every) if OmegaConf.is_config(steps) else steps or 1)


def build_trainer(cfg: DictConfig, strategy: Any, **options: Any) -> Trainer:
    """Build a trainer that only trains, until ``max_steps``."""
    off = "logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"
    none = dict.fromkeys(("limit_val_batches", "num_sanity_val_steps"), 0)
    only = {"max_epochs": -1, **dict.fromkeys((*off, "fast_dev_run"), False), **none, **options}
    trainer: Trainer = instantiate(cfg.trainer, strategy=strategy, **only, _convert_="all")
    return trainer


def build_starter(cfg: DictConfig) -> Trainer:
    """Build the trainer whose launcher will start the ranks. Starts no process itself.

    Other trainers then fit on these ranks, block after block.

    Raises:
        ValueError: If this machine lacks the network interface or the nodes that the config names.
    """
    checks.use_interface(cfg.cluster.interface)
    with block.quiet_lightning():
        starter = build_trainer(cfg, "ddp")
    checks.check_launch(starter)
    configure_launcher(starter.strategy)
    return starter


def run_on_ranks(
    cfg: DictConfig, run: Callable[[Trainer], None], report: Report, program: Program
) -> None:
    """Start the ranks that the cluster needs, and call `run` with the starter on each. Blocks.

    Rank 0 writes and prints the report even if `run` fails. A signal kills all ranks.

    Args:
        cfg: Config of the job.
        run: Called with the starter on each rank. It fits the other trainers, and rank 0 writes
            `report` after each block.
        report: Report that rank 0 prints at the end.
        program: Program that runs this job.
    """
    starter = build_starter(cfg)
    launcher: Any = starter.strategy.launcher

    def on_rank() -> None:
        with block.quiet_lightning():
            starter.strategy.setup_environment()
        run(starter)

    def interrupted(number: int) -> None:
        report.finish()
        program.say_how_to_go_on()
        if launcher is not None:
            launcher.kill(signal.SIGKILL)

    with ExitStack() as stack:
        if starter.is_global_zero:
            folder = job.folder_with(cfg)
            print(f"Measuring. After each block {folder} has table and plot so far.", flush=True)
            stack.enter_context(interrupts.INTERRUPTS.call(interrupted))
            stack.callback(report.finish)
        launcher.launch(on_rank) if launcher else on_rank()


# --- points of a comparison ---------------------------------------------------------------------


def is_replay(cfg: DictConfig) -> bool:
    """Whether the model is a replay, which waits instead of computing."""
    return str(cfg.model._target_).endswith(f".{ReplayModel.__name__}")


def replay_overrides(cfg: DictConfig, world_size: int) -> tuple[str, ...]:
    """Return the override of ``model.compute_s`` that ``ratio`` asks for; empty without a ratio.

    ``ratio`` is the seconds of communication over the seconds of compute in a step.

    Raises:
        ValueError: If ``ratio`` is set and the model is no replay, ``model.compute_s`` is set too,
            the ratio is not positive, there is one rank, or the links have no known rate.
    """
    if cfg.ratio is None:
        return ()
    if not is_replay(cfg):
        raise ValueError(
            f"ratio={cfg.ratio:g} is set, but the model computes: {cfg.model._target_}. Leave ratio"
            " out, or choose model=replay. ratio only changes how long a replayed model waits."
        )
    if cfg.model.get("compute_s") is not None:
        raise ValueError("ratio and model.compute_s both set the seconds of a step. Leave one out.")
    model_bytes = load_profile(cfg.model.profile).scaled(cfg.model.scale).nbytes
    one_way = one_way_s(cfg, model_bytes, world_size)
    if not cfg.ratio > 0 or not one_way:
        raise ValueError(
            f"ratio={cfg.ratio:g} must be above 0, and needs two or more ranks and a cluster whose"
            " links have a known rate (cluster.rate_mbit). Correct them, or set model.compute_s."
        )
    return (as_override("model.compute_s", 2 * one_way / cfg.ratio / batches_per_step(cfg)),)


def one_way_s(cfg: DictConfig, model_bytes: int, world_size: int) -> float | None:
    """Return the seconds that each link needs to reduce-scatter, or to all-gather, the model.

    The ranks of a host share its link. They can sum their gradients before these leave the host, so
    that the host counts as one sender; no schedule sends less. If all ranks are on one host, each
    rank counts as having a link of its own.

    Args:
        cfg: Config with the cluster's links.
        model_bytes: Bytes of all parameters as they are sent.
        world_size: Number of ranks.

    Returns:
        Seconds. None means that the cluster's file has no rate.
    """
    rate_mbit, num_hosts = link_rate_mbit(cfg), int(cfg.cluster.num_nodes)
    if rate_mbit is None:
        return None
    num_links = num_hosts if num_hosts > 1 else world_size
    return (num_links - 1) / num_links * model_bytes / (rate_mbit * 1e6 / 8)


def batches_per_step(cfg: DictConfig) -> int:
    """Return the number of batches whose gradients accumulate in an optimizer step."""
    return int(cfg.trainer.get("accumulate_grad_batches", 1))


def scale_of(cfg: DictConfig) -> float:
    """Return the number that a replay's tensor sizes are divided by; 1 for other models."""
    return float(cfg.model.scale) if is_replay(cfg) else 1.0


def scale_caps(cfg: DictConfig, world_size: int) -> None:
    """Divide the bucket caps in `cfg` by the model's scale. Mutates `cfg`.

    Caps are meant for the unscaled model. Undivided, they would put a model with 1/20 of the bytes
    into 1/20 of the buckets.

    Args:
        cfg: Config of an entry.
        world_size: Number of ranks; a cap of null means a default that depends on it.
    """
    if (scale := scale_of(cfg)) == 1:
        return
    if OmegaConf.is_config(cfg.fusion) and cfg.fusion.get("bucket_cap_mb", 0) is None:
        cfg.fusion.bucket_cap_mb = fusion.default_cap_mb(world_size)
    for node in (cfg.strategy, cfg.fusion):
        for name in node if OmegaConf.is_config(node) else ():
            if name in _CAPS and isinstance(node[name], (int, float)):
                node[name] = node[name] / scale
    if is_ddp(cfg) and cfg.strategy.get("bucket_cap_mb", 0) is None:
        with open_dict(cfg.strategy):
            cfg.strategy.update(competitors.default_ddp_caps(scale))


def link_rate_mbit(cfg: DictConfig) -> float | None:
    """Return a link's rate from the cluster's config, in 10^6 bits per second; None if unknown."""
    if cfg.cluster.get("rate_mbit") is not None:
        return float(cfg.cluster.rate_mbit)
    beta = cfg.cluster.beta_s_per_byte
    return 8 / beta / 1e6 if beta else None


def point_of(cfg: DictConfig, label: str, model: LightningModule, world_size: int) -> files.Line:
    """Return the columns of `studies.summary` that all entries of a point share.

    The seconds of compute are known for a replay; for other models they are measured later.

    Args:
        cfg: Config of the point.
        label: Name of the point for people.
        model: A model with the same config as the entries' models.
        world_size: Number of ranks.
    """
    profile = model.profile if isinstance(model, ReplayModel) else None
    rate_mbit, scale = link_rate_mbit(cfg), scale_of(cfg)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    itemsize = _ITEMSIZES.get(str(cfg.trainer.get("precision")))
    model_bytes = sum(one.numel() * (itemsize or one.itemsize) for one in trained)
    net = cfg.model.get("net", {})
    name = profile.name if profile else str(net.get("_target_", cfg.model._target_)).split(".")[-1]
    return {
        "point": label,
        "model": name,
        "is_replay": profile is not None,
        "scale": scale,
        "link_rate_mbit": rate_mbit,
        "stands_for_mbit": None if rate_mbit is None else rate_mbit * scale,
        "rate_source": "shaped" if cfg.cluster.get("rate_mbit") is not None else "assumed",
        "world_size": world_size,
        "model_bytes": model_bytes,
        "compute_source": "profile" if profile else "not measured",
        "forward_s": profile.forward_s * batches_per_step(cfg) if profile else None,
        "backward_s": profile.backward_s * batches_per_step(cfg) if profile else None,
        "one_way_s": one_way_s(cfg, model_bytes, world_size),
        "rig": emulated_rig(),
    }
