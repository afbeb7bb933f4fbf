"""``dear-train``: fits a job, tests the final weights, prints metrics and the cost of a step."""

import logging
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Callback, Trainer, seed_everything
from omegaconf import DictConfig, OmegaConf
from torch.nn import Module

from lightning_dear.apps import checks, emulated, job
from lightning_dear.apps.doctor import doctor
from lightning_dear.apps.program import Program
from lightning_dear.apps.train import report
from lightning_dear.checkpoint import weights
from lightning_dear.strategy.launchers import configure_launcher

log = logging.getLogger(__name__)


def train(cfg: DictConfig) -> dict[str, float]:
    """Fit and test the job described by ``cfg``; return its test metrics.

    With ``doctor=true`` only examines the cluster, and returns no metric. With ``eval=true`` only
    tests the checkpoint ``ckpt_path``.

    Starts the other ranks of this host if the strategy needs them, and blocks until they have
    ended. Writes the resolved config, metrics and checkpoints into the job's folder.

    Raises:
        ValueError: If the config names an interface, nodes or devices that do not exist, or asks
            for ``eval=true`` without a checkpoint.
    """
    check(cfg)
    if cfg.eval and cfg.ckpt_path is None:
        raise ValueError("eval=true tests a checkpoint, but has none. Add ckpt_path=FILE.")
    if cfg.init_from is not None and cfg.ckpt_path is not None:
        raise ValueError("ckpt_path has weights of its own. Leave out init_from, or ckpt_path.")
    seed_everything(cfg.seed, workers=True, verbose=False)
    if cfg.doctor:
        doctor.examine_job(cfg, build_trainer(cfg))
        return {}
    datamodule = instantiate(cfg.data, _convert_="all")
    model = instantiate(cfg.model, _convert_="all")
    if cfg.init_from is not None:
        _load_weights(model, cfg.init_from)
    trainer = build_trainer(cfg, callbacks=[report.EpochLines()])
    rank_zero_only(job.folder_with)(cfg)
    for logger in trainer.loggers:
        logger.log_hyperparams(OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]
    if not cfg.eval:
        with report.folder_named(trainer):
            trainer.fit(model, datamodule=datamodule, ckpt_path=cfg.ckpt_path)
    tested = cfg.ckpt_path if cfg.eval else None
    (metrics,) = trainer.test(model, datamodule=datamodule, ckpt_path=tested, verbose=False)
    if trainer.is_global_zero:
        report.end_of_job(cfg, trainer, metrics)
    return dict(metrics)


def _load_weights(model: Module, path: str) -> None:
    try:
        model.load_state_dict(weights.read(path))
    except RuntimeError as error:
        raise ValueError(f"init_from={path} has weights of another model. {error}") from error


jobs_end = report.jobs_end


def check(cfg: DictConfig) -> None:
    """Check the config before anything is built, and make gloo and NCCL use its interface.

    Raises:
        ValueError: If this machine does not have the interface, or an added option is misspelt.
    """
    checks.use_interface(cfg.cluster.interface)
    options: Any = OmegaConf.to_container(cfg, resolve=False)
    chosen, warn = list(HydraConfig.get().overrides.task), rank_zero_only(log.warning)
    for group in checks.ignored_groups(chosen, options["strategy"]):
        warn("%s is ignored. Leave it out: only strategy=dear reads it.", group)
    for key, hint in checks.unknown_options(options).items():
        if hint and any(word.lstrip("+").partition("=")[0] == key for word in chosen):
            what = f"{key} is no option of dear-train.{hint} Then write it without +."
            raise ValueError(f"{what} Nothing would read it.")
        warn("%s is no option of dear-train.%s Leave it out unless your config uses it.", key, hint)


def build_trainer(
    cfg: DictConfig, strategy: Any = None, callbacks: Sequence[Callback] = ()
) -> Trainer:
    """Build the trainer with its strategy, callbacks and loggers. Starts no process.

    Args:
        cfg: Config of the job.
        strategy: Strategy, or its name. None means the config's.
        callbacks: Callbacks in addition to the config's.
    """
    if strategy is None:
        strategy = cfg.strategy
        if OmegaConf.is_config(strategy):
            strategy = instantiate(strategy, _convert_="all")
    trainer: Trainer = instantiate(
        cfg.trainer,
        strategy=strategy,
        callbacks=[*build_all(cfg.get("callbacks")), *callbacks],
        enable_progress_bar=cfg.trainer.enable_progress_bar and sys.stdout.isatty(),
        logger=build_all(cfg.get("logger")) or False,
        _convert_="all",
    )
    checks.check_single_process(trainer, strategy)
    checks.check_launch(trainer)
    configure_launcher(trainer.strategy)
    return trainer


def build_all(nodes: DictConfig | None) -> list[Any]:
    """Build the members of a config group, callbacks or loggers. None means an empty group."""
    built = (nodes or {}).values()
    return [instantiate(node, _convert_="all") for node in built if node is not None]


def run_job(cfg: DictConfig, program: Program) -> float | None:
    """Run one job. Return the metric that a sweeper optimizes; None if the config names none."""
    # The first warning is due to Hydra's log file, which is in the folder before the CSV logger.
    # The second is due to Lightning's own use of torch. The user can change neither.
    warnings.filterwarnings("ignore", message=".*logs directory .* exists and is not empty.*")
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
    if emulated.restart_on_cluster(cfg, "lightning_dear.apps.train"):
        return None
    metrics = train(cfg)
    return metrics[cfg.optimized_metric] if metrics and cfg.optimized_metric else None
