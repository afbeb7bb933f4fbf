"""Run `ip` and `tc`, and say in one sentence why they cannot do what was asked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

TOOLS = {"ip": "iproute2", "tc": "iproute2", "setpriv": "util-linux"}
"""Programs that the emulation runs, and what they belong to."""

_COMMAND_TIMEOUT_S = 30.0


class EmulationUnavailable(RuntimeError):
    """This machine cannot emulate a cluster; the message says what is missing."""


def why_unavailable() -> str | None:
    """Say what this machine lacks for an emulated cluster; None if nothing obvious.

    Looks at the system, the user and the installed programs, and changes nothing: a kernel or a
    container that forbids namespaces shows only when a cluster is set up.
    """
    if sys.platform != "linux":
        return f"an emulated cluster needs Linux, not {sys.platform}"
    if os.geteuid() != 0:
        return "an emulated cluster needs root, to create network namespaces: use sudo"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        packages = " and ".join(dict.fromkeys(TOOLS[tool] for tool in missing))
        return f"an emulated cluster needs {' and '.join(missing)}: install {packages}"
    return None


def run(argv: Sequence[str]) -> str:
    """Run one command and return what it printed.

    Args:
        argv: Program and arguments; no shell interprets them.

    Raises:
        EmulationUnavailable: The command cannot be started, fails or takes too long.
    """
    command = " ".join(argv)
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise EmulationUnavailable(f"`{command}`: {argv[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise EmulationUnavailable(f"`{command}` took over {_COMMAND_TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        raise EmulationUnavailable(f"this machine refused `{command}`: {done.stderr.strip()}")
    return done.stdout
