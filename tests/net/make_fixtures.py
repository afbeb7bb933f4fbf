"""Writes the checkpoints that every later version has to go on from.

    python -m tests.net.make_fixtures [--only KIND]

They were written by 7283dee: writing them again, by another version, would prove nothing. With each
of them goes what continuing from it gave there. What has been added since is the list of places in
`checkpoint.pt` of folders.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.distributed.harness import run_ranks, start_server, stop_server
from tests.net.pulling import (
    FIXTURES,
    FORMS,
    KINDS,
    WORLD_SIZE,
    files_in,
    machine,
    resume,
    saved,
    structure,
    written,
)

MOST_BYTES = 1 << 20


def expected_of(kind: str, form: str) -> dict[str, Any]:
    """What resuming gives, as `expected/<kind>.<form>.pt` holds it."""
    path = FIXTURES / f"{kind}.{form}"
    with tempfile.TemporaryDirectory() as folder:
        again = Path(folder) / "again.ckpt"
        first = run_ranks(resume, WORLD_SIZE, kind, form, again, timeout_s=300)[0]
        return {
            "machine": machine(),
            "loaded": first["loaded"],
            "ended": first["ended"],
            "weights": first["weights"],
            "plan": first["plan"],
            "written": structure(saved(path)),
            "files": files_in(path),
            "again": structure(saved(again)),
        }


def make(kind: str, form: str) -> None:
    """Writes one fixture and what resuming it gives."""
    path = FIXTURES / f"{kind}.{form}"
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    run_ranks(written, WORLD_SIZE, kind, form, path, timeout_s=300)
    folder = FIXTURES / "expected"
    folder.mkdir(exist_ok=True)
    torch.save(expected_of(kind, form), folder / f"{kind}.{form}.pt")


def main() -> None:
    """Writes all, or one kind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=KINDS)
    options = parser.parse_args()
    FIXTURES.mkdir(exist_ok=True)
    start_server()
    try:
        for kind in KINDS if options.only is None else (options.only,):
            for form in FORMS[kind]:
                make(kind, form)
                print(f"{kind}.{form}")
    finally:
        stop_server()
    size = sum(one.stat().st_size for one in FIXTURES.rglob("*") if one.is_file())
    assert size < MOST_BYTES, size
    print(f"{size / 1024:.0f} KiB in {FIXTURES}")


if __name__ == "__main__":
    main()
