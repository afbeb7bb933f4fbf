"""Running one job of possibly many in one process: its environment, its errors, its end."""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from lightning.pytorch import Trainer
from omegaconf import DictConfig, OmegaConf

from lightning_dear.collectives.factory import forget_process_groups
from lightning_dear.strategy.launchers import JobLauncher, end_processes, ending

CHILD_END_S = 60.0
"""Seconds that child ranks have for ending after the last collective of a job."""


@contextmanager
def isolated_job() -> Iterator[None]:
    """Give the next job of a sweep the environment this one found, and no process group.

    Lightning leaves LOCAL_RANK, MASTER_PORT and the group behind, and takes them, at the next
    Trainer, for a sign that somebody else has started the ranks.
    """
    environment = dict(os.environ)
    num_threads = torch.get_num_threads()
    yield
    # Not after an error: the process is about to end, and an NCCL group may block in here.
    forget_process_groups()
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    torch.set_num_threads(num_threads)


def wait_for_children(trainer: Trainer) -> None:
    """Block until the ranks that ``trainer`` started have ended; at most ``CHILD_END_S`` seconds.

    Raises:
        RuntimeError: If one of them failed after the last collective.
    """
    launcher = trainer.strategy.launcher
    if not isinstance(launcher, JobLauncher):
        return
    codes = end_processes(launcher.procs, CHILD_END_S)
    failed = [f"local rank {index + 1} {ending(code)}" for index, code in enumerate(codes) if code]
    if failed:
        raise RuntimeError(
            "The job is done and its results are saved, but while shutting down"
            f" {', '.join(failed)}; what it printed is above."
        )


def end_unless_zero(code: int) -> None:
    """End this process with the exit code of the ranks that did the job in its place.

    Returns if they succeeded, so that a sweep goes on with its next job.

    Raises:
        SystemExit: If ``code`` is not 0.
    """
    if code:
        raise SystemExit(code)


def folder_with(cfg: DictConfig) -> Path:
    """Write the resolved config into the job's folder, and return that folder."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(cfg, resolve=True))
    return folder


@contextmanager
def one_message(program: str) -> Iterator[None]:
    """Turn an exception into one message on stderr and exit code 1.

    The traceback goes to a file in the job's folder. With HYDRA_FULL_ERROR=1 the exception goes
    on unchanged.

    Args:
        program: Name to print in front of the message.
    """
    try:
        yield
    except Exception as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        rank = os.environ.get("LOCAL_RANK", "0")
        where = f" [local rank {rank}]" if "LOCAL_RANK" in os.environ else ""
        print(f"{program}:{where} {describe(error)}", file=sys.stderr)
        path = Path(HydraConfig.get().runtime.output_dir) / f"traceback_rank{rank}.txt"
        path.write_text(traceback.format_exc())
        print(f"The traceback is in {path} (HYDRA_FULL_ERROR=1 prints it).", file=sys.stderr)
        raise SystemExit(1) from None


def describe(error: BaseException) -> str:
    """Return the message of ``error``, or of what Hydra met while it built an object."""
    key = ""
    while isinstance(error, InstantiationException) and error.__cause__ is not None:
        key = key or _full_key(error)
        error = error.__cause__
    place = f" (while building `{key}`)" if key else ""
    return f"{type(error).__name__}: {error}{place}"


def _full_key(error: InstantiationException) -> str:
    last_line = str(error).splitlines()[-1]
    return last_line.removeprefix("full_key: ") if last_line.startswith("full_key: ") else ""
