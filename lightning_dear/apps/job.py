"""Runs one job of possibly many in one process: its environment, its errors, its end."""

import logging
import os
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

from lightning_dear.studies import files, interrupts


@contextmanager
def isolated_job() -> Iterator[None]:
    """Undo this job's changes for the next job of a sweep.

    Restores environment variables and closes the process group. Blocks at the end until the ranks
    that the job has started have ended.
    """
    from lightning_dear.strategy.launchers import job_end

    # Lightning prints its log lines by a handler of its own. Hydra's handler prints them, too.
    logging.getLogger("lightning").handlers.clear()
    environment, end = dict(os.environ), job_end()
    yield
    # After an error this is skipped: the process ends anyway, and closing an NCCL group may block.
    end()
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


def folder_with(cfg: DictConfig) -> Path:
    """Write the resolved config into the job's folder, and return that folder."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    files.write_text(folder / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True).rstrip())
    return folder


def run_child(command: Sequence[str], **options: Any) -> int:
    """Run a command in a session of its own, and return its exit code. Blocks.

    SIGINT and SIGTERM are passed on to the command, and this process waits until it has ended.

    Args:
        command: Program and arguments.
        **options: Options of `subprocess.Popen`.
    """
    process: subprocess.Popen[bytes] | None = None

    def hand_on(number: int) -> None:
        if process is not None:
            process.send_signal(number)

    with interrupts.INTERRUPTS.call(hand_on, ends=False):
        process = subprocess.Popen(command, start_new_session=True, **options)
        return process.wait()


@contextmanager
def one_message(program: str) -> Iterator[None]:
    """Turn an exception into one message on stderr and exit code 1.

    The traceback goes to a file in the job's folder. If the job has written nothing else, the
    folder is removed instead. With HYDRA_FULL_ERROR=1 the exception is raised unchanged.

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
        config = HydraConfig.get()
        folder = Path(config.runtime.output_dir)
        # Another rank with the same error may have removed the folder already.
        kept = {path.name for path in folder.glob("*")} - {".hydra", f"{config.job.name}.log"}
        if kept or where or folder == Path.cwd():
            path = folder / f"traceback_rank{rank}.txt"
            path.write_text(traceback.format_exc())
            print(f"The traceback is in {path} (HYDRA_FULL_ERROR=1 prints it).", file=sys.stderr)
        else:
            # The error came before the job had written anything.
            shutil.rmtree(folder, ignore_errors=True)
            print("Nothing was written. HYDRA_FULL_ERROR=1 prints the traceback.", file=sys.stderr)
        raise SystemExit(1) from None


def describe(error: BaseException) -> str:
    """Return the message of ``error``; of its cause if Hydra raised it while building an object."""
    key = ""
    while isinstance(error, InstantiationException) and error.__cause__ is not None:
        key = key or "".join(re.findall(r"^full_key: (.*)", str(error), re.MULTILINE))
        error = error.__cause__
    return f"{type(error).__name__}: {error}" + f" (while building `{key}`)" * bool(key)
