"""Other trees of the repository: made for a while, and programs started in them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BEFORE = "7283dee"
"""The commit before files moved."""


@contextmanager
def tree_of(commit_or_folder: str) -> Iterator[Path]:
    """The folder itself, or a worktree of the commit that is removed afterwards."""
    if Path(commit_or_folder).is_dir():
        yield Path(commit_or_folder).resolve()
        return
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder).resolve() / "tree"
        add = [*git, "add", "--quiet", "--detach", str(tree), commit_or_folder]
        subprocess.run(add, check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def start(
    script: Path,
    tree: Path,
    arguments: Sequence[str],
    more: Mapping[str, str] | None = None,
    **options: int,
) -> subprocess.Popen[str]:
    """Starts a script by its path that imports the package from `tree`, with one thread."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'lightning_dear' / '_plugins'}",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        **(more or {}),
    }
    command = [sys.executable, str(script), *arguments]
    return subprocess.Popen(command, cwd=tree, env=environment, text=True, **options)  # type: ignore[call-overload, no-any-return]
