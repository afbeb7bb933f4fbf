"""``dear-bench``: strategies side by side, on the same ranks, with the bounds beside them."""

from pathlib import Path
from typing import Any

from lightning_dear.apps.program import Program


def _job(cfg: Any) -> None:
    from lightning_dear.apps.bench.run import bench

    bench(cfg, PROGRAM)


def _report(folder: Path) -> None:
    from lightning_dear.studies.comparison import join_parts, report_of

    join_parts(folder)
    report_of(folder).finish()


PROGRAM = Program("dear-bench", _job, _report)


def main() -> None:
    """Run one comparison, or several on the same ranks; ``report FOLDER`` shows one again."""
    PROGRAM.main()
