"""``dear-converge``: how training ends under each compressor, against dense training."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

from lightning_dear.apps.program import Program


def _job(cfg: Any, *, trains: bool = True) -> None:
    from lightning_dear.apps.converge.run import converge

    converge(cfg, PROGRAM, trains=trains)


def _report(folder: Path) -> None:
    """Composes the job that has written to the folder again, and trains nothing."""
    overrides = folder / ".hydra" / "overrides.yaml"
    if not (folder / "raw.csv").exists() or not overrides.exists():
        raise ValueError(f"{folder} has no raw.csv and {overrides.name} of dear-converge.")
    from omegaconf import OmegaConf

    sys.argv[1:] = [*OmegaConf.load(overrides), f"hydra.run.dir='{folder}'"]
    PROGRAM.run(partial(_job, trains=False))


PROGRAM = Program("dear-converge", _job, _report)


def main() -> None:
    """Run one study; ``report FOLDER`` shows one again."""
    PROGRAM.main()
