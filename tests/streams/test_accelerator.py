"""On a device that is no CPU, of which there are shapes alone, nobody asks for a number."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

import pytest

from tests.streams.accelerator import CASES, IS_POSSIBLE

pytestmark = pytest.mark.skipif(
    not IS_POSSIBLE, reason="NOT RUN: this torch takes no device that is written in Python"
)

# A device that is written in Python has no generator: whoever draws on it gets the host's.
RUN = """
import torch
of_torch, torch.Generator = torch.Generator, lambda device=None: of_torch()
import lightning_dear.compression
torch.Generator = of_torch
from tests.streams.accelerator import main
main()
"""

WAITS = dict.fromkeys(("unused", "signsgd", "signum"), "engine/gradient_reducer.py:hear")
"""Where the host waits in every step: for what other ranks say of gradients and votes."""


@cache
def refusals() -> dict[str, str | None]:
    """Case -> who has asked for a number."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, str | None] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.xdist_group("accelerator")
def test_nobody_waits_for_the_device(name: str) -> None:
    found = refusals()[name]
    if name in WAITS:
        assert found is not None
        assert found.startswith(WAITS[name]), found
    else:
        assert found is None, found
