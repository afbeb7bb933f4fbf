"""On a device that is no CPU, of which there are shapes alone, nobody asks for a number."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.streams.accelerator import CASES, IS_POSSIBLE

pytestmark = pytest.mark.skipif(
    not IS_POSSIBLE, reason="NOT RUN: this torch takes no device that is written in Python"
)

# A device that is written in Python has no generator: whoever draws on it gets the host's.
RUN = """
import torch
of_torch = torch.Generator
class OfHost:
    def __new__(cls, device=None):
        return of_torch()
torch.Generator = OfHost
import lightning_dear.compression
torch.Generator = of_torch
from tests.streams.accelerator import main
main()
"""

WAITS = dict.fromkeys(
    ("unused", "signsgd", "signum"),
    ["engine/bucket_round.py:_flags", "engine/bucket_round.py:_hear"],
)
"""Where the host waits in every step: for what other ranks say of gradients and votes, and right
before that, for a copy of what it says itself."""


def test_nobody_waits_for_the_device() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, list[str]] = json.loads(done.stdout)
    assert found.keys() == CASES.keys()
    others = {name: told for name, told in found.items() if not _are_known(told, WAITS.get(name))}
    assert not others, json.dumps(others, indent=1)


def _are_known(told: list[str], known: list[str] | None) -> bool:
    """Whether these are all of those, in their order."""
    places = [one.rpartition(":")[0] for one in (each.split(" < ")[0] for each in told)]
    return places == (known or [])
