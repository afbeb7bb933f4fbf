"""The versions this package was tested with, and one warning outside them."""

from __future__ import annotations

import platform
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version


@dataclass(frozen=True)
class TestedRange:
    """Versions of one dependency that the test suite was run with.

    Attributes:
        name: Distribution name, or "python".
        minimum: First version inside the range, for example (2, 6).
        below: First version past the range.
    """

    __test__ = False  # pytest would collect a class of this name.

    name: str
    minimum: tuple[int, ...]
    below: tuple[int, ...]

    def includes(self, installed: str) -> bool:
        """Tell whether `installed` lies inside; local and pre-release suffixes do not count."""
        release = _release(installed)
        return self.minimum <= release < self.below

    def __str__(self) -> str:
        return f">={_dotted(self.minimum)},<{_dotted(self.below)}"


TESTED_RANGES = (
    TestedRange("python", (3, 10), (3, 14)),
    TestedRange("torch", (2, 6), (2, 14)),
    TestedRange("lightning", (2, 5), (2, 7)),
)

MIRROR_RANGES = tuple(
    replace(tested, name=tested.name.replace("lightning", "pytorch-lightning"))
    for tested in TESTED_RANGES
)
"""What counts where `pytorch_lightning` is used, which has the version numbers of `lightning`."""

_named: set[str] = set()


def warn_outside_tested_range(ranges: Sequence[TestedRange] = TESTED_RANGES) -> None:
    """Warn, naming every version outside `ranges`; silent when all lie inside.

    A version that was named in an earlier warning of this process is not named again.
    """
    problems = (_outside(tested) for tested in ranges)
    outside = [problem for problem in problems if problem and problem not in _named]
    if outside:
        _named.update(outside)
        warnings.warn(
            f"lightning-dear was not tested with {' and '.join(outside)}. Install a tested version,"
            " or run the test suite of lightning-dear on yours (make test).",
            UserWarning,
            stacklevel=3,
        )


def _outside(tested: TestedRange) -> str | None:
    installed = _installed(tested.name)
    if installed is None or tested.includes(installed):
        return None
    return f"{tested.name} {installed} (tested: {tested})"


def _installed(name: str) -> str | None:
    if name == "python":
        return platform.python_version()
    try:
        return version(name)
    except PackageNotFoundError:
        return None  # The import that needs it fails with the better message.


def _release(text: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def _dotted(parts: tuple[int, ...]) -> str:
    return ".".join(map(str, parts))
