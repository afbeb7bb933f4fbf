"""``dear-converge``: how training ends under each compressor, against dense training."""

from pathlib import Path
from typing import Any

from lightning_dear.apps.program import Program


def _job(cfg: Any) -> None:
    from lightning_dear.apps.converge.run import converge

    converge(cfg, PROGRAM)


def _report(folder: Path) -> None:
    from lightning_dear.studies.convergence import WORDS, draw, text_of
    from lightning_dear.studies.report import show

    show(folder, WORDS, text_of, draw)


PROGRAM = Program("dear-converge", _job, _report)


def main() -> None:
    """Run one study; ``report FOLDER`` shows one again."""
    PROGRAM.main()
