"""A job that ends well leaves with 0, whatever gloo's threads still hold."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
JOBS = 2


def test_ranks_end_with_0(tmp_path: Path) -> None:
    """Without an end of the groups every rank leaves with 3, or aborts."""
    script = Path(__file__).with_name("ending_ranks.py")
    child = subprocess.run(
        [sys.executable, script, tmp_path, str(JOBS)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.split() == ["0"] * 2 * JOBS, child.stderr
