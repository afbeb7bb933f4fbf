"""Lists the versions with which this package was tested, and warns if others are installed."""

from __future__ import annotations

import platform
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

Ranges = Mapping[str, tuple[str, str]]
"""Distribution, or "python" -> (first version inside the range, first version behind it)."""

TESTED_RANGES = {"python": ("3.10", "3.14"), "torch": ("2.6", "2.16"), "lightning": ("2.5", "2.7")}
"""Versions with which the test suite was run."""

MIRROR_RANGES = {
    name.replace("lightning", "pytorch-lightning"): ends for name, ends in TESTED_RANGES.items()
}
"""The same for `pytorch_lightning`, which has the version numbers of `lightning`."""

_named: set[str] = set()
"""Versions that this process has already warned about."""


def warn_outside_tested_range(ranges: Ranges = TESTED_RANGES) -> None:
    """Warns once about every installed version that lies outside `ranges`.

    A version that an earlier warning of this process has named is not named again.
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
        # A missing distribution is no matter here: the import that needs it fails with a better
        # message.
        with suppress(PackageNotFoundError):
            installed = platform.python_version() if name == "python" else version(name)
            if not is_inside(installed, minimum, below):
                yield f"{name} {installed} (tested: >={minimum},<{below})"


def is_inside(installed: str, minimum: str, below: str) -> bool:
    """Tells whether `minimum` <= `installed` < `below`; suffixes such as "+cu121" do not count."""
    return _release(minimum) <= _release(installed) < _release(below)


def _release(text: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()
