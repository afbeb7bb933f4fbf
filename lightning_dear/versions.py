"""The versions this package was tested with, and one warning outside them."""

from __future__ import annotations

import platform
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

Ranges = Mapping[str, tuple[str, str]]
"""Distribution, or "python" -> the first version inside the range and the first one past it."""

TESTED_RANGES = {"python": ("3.10", "3.14"), "torch": ("2.6", "2.16"), "lightning": ("2.5", "2.7")}
"""Versions that the test suite was run with."""

MIRROR_RANGES = {
    name.replace("lightning", "pytorch-lightning"): ends for name, ends in TESTED_RANGES.items()
}
"""What counts where `pytorch_lightning` is used, which has the version numbers of `lightning`."""

_named: set[str] = set()


def warn_outside_tested_range(ranges: Ranges = TESTED_RANGES) -> None:
    """Warn, naming every version outside `ranges`; silent when all lie inside.

    A version that was named in an earlier warning of this process is not named again.
    """
    outside = [problem for problem in _outside(ranges) if problem not in _named]
    if outside:
        _named.update(outside)
        warnings.warn(
            f"lightning-dear was not tested with {' and '.join(outside)}. Install a tested version,"
            " or run the test suite of lightning-dear on yours (make test).",
            UserWarning,
            stacklevel=3,
        )


def _outside(ranges: Ranges) -> Iterator[str]:
    for name, (minimum, below) in ranges.items():
        # A missing one is left to the import that needs it, which fails with the better message.
        with suppress(PackageNotFoundError):
            installed = platform.python_version() if name == "python" else version(name)
            if not is_inside(installed, minimum, below):
                yield f"{name} {installed} (tested: >={minimum},<{below})"


def is_inside(installed: str, minimum: str, below: str) -> bool:
    """Whether a version lies in the range; local and pre-release suffixes do not count."""
    return _release(minimum) <= _release(installed) < _release(below)


def _release(text: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()
