"""``dear-bench``: strategies side by side, on the same ranks, with the bounds beside them."""

from pathlib import Path
from typing import Any

from lightning_dear.apps.program import Program


def _job(cfg: Any) -> None:
    from lightning_dear.apps.bench.run import bench

    bench(cfg, PROGRAM)


def _report(folder: Path) -> None:
    from lightning_dear.studies.comparison import draw, join_parts, text_of
    from lightning_dear.studies.report import show
    from lightning_dear.studies.summary import WORDS

    join_parts(folder)
    show(folder, WORDS, text_of, draw)


PROGRAM = Program("dear-bench", _job, _report)


def main() -> None:
    """Run one comparison, or several on the same ranks; ``report FOLDER`` shows one again."""
    PROGRAM.main()
