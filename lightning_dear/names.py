"""What a misspelt name may have been meant to be, and which extra brings a missing library."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from importlib.util import find_spec

APPS = ("sklearn", "scipy", "matplotlib")
"""What the extra `apps` brings: all programs but dear-train need it, training does not."""


def is_meant(name: str, names: Iterable[str]) -> str:
    """A question to append to a message: one of `names`, if any comes close, after a space."""
    known = list(names)
    plain = "".join(filter(str.isalnum, name.lower()))
    close = get_close_matches(name, known, n=1) or get_close_matches(plain, known, n=1)
    return f" Is {close[0]!r} meant?" if close else ""


def check_name(what: str, name: str, names: Iterable[str]) -> str:
    """Return `name`, which must be one of `names`.

    Raises:
        ValueError: If it is none; the message lists them. `what` says what they are names of.
    """
    known = list(names)
    if name not in known:
        valid = ", ".join(known)
        raise ValueError(f"Unknown {what} {name!r}; valid ones: {valid}.{is_meant(name, known)}")
    return name


def need(
    what: str, *modules: str, extra: str = "apps", error: type[BaseException] = ModuleNotFoundError
) -> None:
    """Raise `error`, naming our extra, unless all `modules` are installed; imports none of them.

    Args:
        what: Who needs them, for the message.
        *modules: Top-level names.
        extra: Of ours, which installs them.
        error: `SystemExit` ends a program with this one sentence.
    """
    if missing := [name for name in modules if find_spec(name) is None]:
        raise error(f'{what} needs {", ".join(missing)}: pip install "lightning-dear[{extra}]"')
