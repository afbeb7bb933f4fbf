"""A script with a fault: `python fault_script.py START_METHOD FOLDER KIND PHASE RANK STEP`."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

from tests.distributed.rank import STAGED, staged
from tests.lightning.faults import OPTIONS, TIMEOUT, Fault, fit, keeper_in, new_strategy

START_TIMEOUT = timedelta(seconds=90)


class ShortTimeout(Callback):
    """Ranks may be slow to start, since they import; once they have started they are not."""

    def setup(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if "FAULT_LONG_TIMEOUT" not in os.environ:
            trainer.strategy._timeout = TIMEOUT


def main(start_method: str, folder: Path, fault: Fault) -> None:
    """Trains on two processes of this host."""
    trainer = Trainer(
        strategy=new_strategy(start_method=start_method, timeout=START_TIMEOUT),
        accelerator="cpu",
        devices=2,
        callbacks=[keeper_in(folder), ShortTimeout()],
        logger=False,
        enable_progress_bar=False,
        **OPTIONS,
    )
    fit(trainer, fault)


if __name__ == "__main__":
    start_method, folder, kind, phase, rank, step = sys.argv[1:]
    with staged() if os.environ.get(STAGED) else nullcontext():
        main(start_method, Path(folder), Fault(kind, phase, int(rank), int(step)))
