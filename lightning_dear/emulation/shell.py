"""Runs `ip` and `tc`, and turns their failures into one message."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence

TOOLS = {"ip": "iproute2", "tc": "iproute2", "setpriv": "util-linux", "unshare": "util-linux"}
"""Programs that the emulation runs -> package that contains them."""

# `ip netns` writes to /run/netns, where only root may; so the user's namespace mounts its own.
_OWN_RUN = (
    "mount -t tmpfs none /run/netns 2>&- || { mount -t tmpfs none /run && mkdir /run/netns; }"
)
_OWN_NAMESPACES = ("unshare", "--user", "--map-root-user", "--net", "--mount")

AS_OWN_ROOT = (*_OWN_NAMESPACES, "sh", "-c", f'{_OWN_RUN} && exec "$@"', "sh")
"""Prefix of a command that runs it as root of new namespaces. Outside of these it has only the
user's rights."""

_COMMAND_TIMEOUT_S = 30.0


class EmulationUnavailable(RuntimeError):
    """This machine cannot emulate a cluster; the message says what is missing."""


def why_unavailable(*, as_own_root: bool = False) -> str | None:
    """Return what this machine lacks for an emulated cluster. None means that nothing is missing.

    Checks the system, the user and the installed programs, and changes nothing. A kernel or a
    container that forbids namespaces even to root is noticed only when a cluster is set up.

    Args:
        as_own_root: Whether a user other than root may use `AS_OWN_ROOT`, if the kernel allows it.
    """
    if sys.platform != "linux":
        return f"an emulated cluster needs Linux, not {sys.platform}: run this on a Linux machine"
    if os.geteuid() != 0 and not as_own_root:
        again = shlex.join([*AS_OWN_ROOT, sys.executable, *sys.argv])
        what = "use sudo, or start it in namespaces of your own, as dear-bench does by itself"
        return f"an emulated cluster needs root: {what}: {again}"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        packages = " and ".join(dict.fromkeys(TOOLS[tool] for tool in missing))
        return f"an emulated cluster needs {' and '.join(missing)}, not found: install {packages}"
    if os.geteuid() != 0:
        try:
            run([*AS_OWN_ROOT, "true"])
        except EmulationUnavailable as error:
            said = str(error).rpartition(": ")[2]
            return (
                "an emulated cluster needs root, or namespaces of your own, which this system"
                f" refuses ({said}): let users make them (sudo sysctl"
                " kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu,"
                " kernel.unprivileged_userns_clone=1 on Debian), or run it as root"
            )
    return None


def run(argv: Sequence[str]) -> str:
    """Run one command and return its stdout.

    Args:
        argv: Program and arguments; no shell interprets them.

    Raises:
        EmulationUnavailable: If the command cannot be started, fails or takes too long.
    """
    command = " ".join(argv)
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S)
    except FileNotFoundError:
        raise EmulationUnavailable(f"`{command}`: {argv[0]} is missing. Install it") from None
    except subprocess.TimeoutExpired:
        raise EmulationUnavailable(f"`{command}` did not end in {_COMMAND_TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        raise EmulationUnavailable(f"refused `{command}`, try it as root: {done.stderr.strip()}")
    return done.stdout
