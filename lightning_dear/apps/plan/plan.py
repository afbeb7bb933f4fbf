"""``dear-plan``: which strategy would be fastest for a model on a cluster, without either.

Imports little, so that a line is there at once; the rest, Lightning and torch, takes seconds.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

import hydra
from omegaconf import DictConfig

from lightning_dear.paths import conf_dir

CALIBRATE = "calibrate"
"""The command line's first word, to measure instead of to predict."""


def main() -> None:
    """``dear-plan``, or ``dear-plan calibrate``."""
    if sys.argv[1:2] == [CALIBRATE]:
        # As a module of its own, which its ranks can be started as.
        module = f"lightning_dear.apps.plan.{CALIBRATE}"
        os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[2:]])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    print("dear-plan: predicts steps; starts no process, measures nothing.", file=sys.stderr)
    plan_job()


def _end(number: int, frame: FrameType | None) -> None:
    name = signal.Signals(number).name
    print(f"\ndear-plan: ended by {name} before the plan was made.", file=sys.stderr, flush=True)
    # At once, as an exception may be caught by whatever is being imported. No process was started.
    os._exit(128 + number)


@hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="plan")
def plan_job(cfg: DictConfig) -> None:
    """Plan one job."""
    from lightning_dear.apps import job
    from lightning_dear.apps.plan.report import plan

    with job.one_message("dear-plan"):
        plan(cfg, job.folder_with(cfg))


if __name__ == "__main__":
    main()
