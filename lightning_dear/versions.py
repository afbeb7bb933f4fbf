"""The versions this package was tested with, and one warning outside them."""

from __future__ import annotations

import platform
import re
import warnings
from dataclasses import dataclass
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


def warn_outside_tested_range() -> None:
    """Warn once, naming every version outside `TESTED_RANGES`; silent when all lie inside."""
    outside = [problem for tested in TESTED_RANGES if (problem := _outside(tested))]
    if outside:
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
