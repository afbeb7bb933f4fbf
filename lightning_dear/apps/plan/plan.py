"""``dear-plan``: which strategy would be fastest for a model on a cluster, without either.

Imports little, so that a line is there at once; the rest, Lightning and torch, takes seconds.
"""

from __future__ import annotations

import runpy
import signal
import sys

import hydra
from omegaconf import DictConfig

from lightning_dear.names import APPS, need
from lightning_dear.paths import conf_dir
from lightning_dear.studies.interrupts import INTERRUPTS


def main() -> None:
    """``dear-plan``, or ``dear-plan calibrate``."""
    need("dear-plan", *APPS, error=SystemExit)
    with INTERRUPTS.call(_end):
        if sys.argv[1:2] == ["calibrate"]:
            # As a module of its own, which its ranks can be started as.
            sys.argv.pop(1)
            runpy.run_module("lightning_dear.apps.plan.calibrate", None, "__main__", True)
        else:
            said = "dear-plan: predicts steps; starts no process, measures nothing."
            print(said, file=sys.stderr)
            plan_job()


def _end(number: int) -> None:
    name = signal.Signals(number).name
    print(f"\ndear-plan: ended by {name} before the plan was made.", file=sys.stderr)


@hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="plan")
def plan_job(cfg: DictConfig) -> None:
    """Plan one job."""
    from lightning_dear.apps import job
    from lightning_dear.apps.plan.report import plan

    with job.one_message("dear-plan"):
        plan(cfg, job.folder_with(cfg))
