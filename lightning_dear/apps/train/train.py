"""``dear-train``: compose a job, fit it, test the final weights, print what it cost."""

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

from lightning_dear.apps import checks, emulated, job
from lightning_dear.apps.doctor import doctor
from lightning_dear.apps.program import Program
from lightning_dear.apps.train import report
from lightning_dear.strategy.launchers import configure_launcher

log = logging.getLogger(__name__)


def train(cfg: DictConfig) -> dict[str, float]:
    """Fit and test the job described by ``cfg``; return its test metrics.

    With ``doctor=true`` only examine the cluster that it would run on, and return nothing. With
    ``eval=true`` only test the checkpoint ``ckpt_path``.

    Starts the other ranks of this host where the strategy needs them, and blocks until they have
    ended. Writes the resolved config, metrics and checkpoints into the job's folder.

    Raises:
        ValueError: If the config asks for what this machine does not have.
    """
    check(cfg)
    if cfg.eval and cfg.ckpt_path is None:
        raise ValueError("eval=true tests a checkpoint: name its file with ckpt_path=...")
    seed_everything(cfg.seed, workers=True, verbose=False)
    if cfg.doctor:
        doctor.examine_job(cfg, build_trainer(cfg))
        return {}
    datamodule = instantiate(cfg.data, _convert_="all")
    model = instantiate(cfg.model, _convert_="all")
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


jobs_end = report.jobs_end


def check(cfg: DictConfig) -> None:
    """Raise or warn about what can be known before anything is built; sets the interface."""
    checks.use_interface(cfg.cluster.interface)
    options: Any = OmegaConf.to_container(cfg, resolve=False)
    chosen = list(HydraConfig.get().overrides.task)
    for group in checks.ignored_groups(chosen, options["strategy"]):
        log.warning("%s is ignored: only strategy=dear reads it.", group)
    for key in checks.unknown_options(options):
        log.warning("%s is no option of dear-train: nothing reads it but your own config.", key)


def build_trainer(
    cfg: DictConfig, strategy: Any = None, callbacks: Sequence[Callback] = ()
) -> Trainer:
    """Build the trainer with its strategy, callbacks and loggers; starts no process.

    Args:
        cfg: The job.
        strategy: None: the config's.
        callbacks: Beside the config's.
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
    checks.check_nodes(trainer)
    configure_launcher(trainer.strategy)
    return trainer


def build_all(nodes: DictConfig | None) -> list[Any]:
    """Build what a group holds, callbacks or loggers; nothing of a group that is None."""
    built = (nodes or {}).values()
    return [instantiate(node, _convert_="all") for node in built if node is not None]


def run_job(cfg: DictConfig, program: Program) -> float | None:
    """Runs one job; returns the metric that a sweeper optimizes, if one is named."""
    # Hydra's log file already lies in the folder, which the CSV logger warns about; the second is
    # Lightning's use of torch, on every rank, that no user can change.
    warnings.filterwarnings("ignore", message=".*logs directory .* exists and is not empty.*")
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
    if emulated.restart_on_cluster(cfg, "lightning_dear.apps.train"):
        return None
    metrics = train(cfg)
    return metrics[cfg.optimized_metric] if metrics and cfg.optimized_metric else None
