"""What a misspelt name may have been meant to be."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def is_meant(name: str, names: Iterable[str]) -> str:
    """A question to append to a message: one of `names`, if any comes close, after a space."""
    known = list(names)
    plain = "".join(filter(str.isalnum, name.lower()))
    close = get_close_matches(name, known, n=1) or get_close_matches(plain, known, n=1)
    return f" Is {close[0]!r} meant?" if close else ""
