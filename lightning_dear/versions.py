"""Lists the versions with which this package was tested, and warns if others are installed."""

import platform
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

Ranges = Mapping[str, tuple[str, str]]
"""Name of a distribution, or "python" -> (first version inside the range, first version after the
range)."""

TESTED_RANGES = {"python": ("3.10", "3.14"), "torch": ("2.6", "2.16"), "lightning": ("2.5", "2.7")}
"""Ranges of versions with which the test suite was run; see `Ranges`."""

MIRROR_RANGES = {
    name.replace("lightning", "pytorch-lightning"): ends for name, ends in TESTED_RANGES.items()
}
"""Same as `TESTED_RANGES`, with `pytorch-lightning` in place of `lightning`. Both have the same
version numbers."""

_named: set[str] = set()
"""Lines of `_outside` that this process has already warned about."""


def warn_outside_tested_range(ranges: Ranges = TESTED_RANGES) -> None:
    """Warns about all installed versions that lie outside `ranges`, in one warning.

    A version that an earlier warning of this process has named is not named again. Does nothing if
    no version is left. Distributions that are not installed are not named.
    """
    outside = [problem for problem in _outside(ranges) if problem not in _named]
    if outside:
        _named.update(outside)
        warnings.warn(
            f"lightning-dear was not tested with {' and '.join(outside)}. Install a tested version,"
            " or run the test suite of lightning-dear on yours (make test).",
            stacklevel=3,
        )


def _outside(ranges: Ranges) -> Iterator[str]:
    """Yields, for each installed version outside its range, what to say about it."""
    for name, (minimum, below) in ranges.items():
        # A missing distribution is ignored here, since the import that needs it fails with a better
        # message.
        with suppress(PackageNotFoundError):
            installed = platform.python_version() if name == "python" else version(name)
            if not is_inside(installed, minimum, below):
                yield f"{name} {installed} (tested: >={minimum},<{below})"


def is_inside(installed: str, minimum: str, below: str) -> bool:
    """Tells whether `minimum` <= `installed` < `below`.

    Only the leading numbers of a version count, not suffixes such as "+cu121" or "rc1".
    """
    return _release(minimum) <= _release(installed) < _release(below)


def _release(text: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version. Empty means that it begins with none."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()
