"""Deliberate bugs in error feedback, for trainings that must end worse: negative controls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from typing_extensions import override

from lightning_dear.compression import error_feedback
from lightning_dear.compression.error_feedback import Encoded, Residual


class DoubledResidual(Residual):
    """Keeps twice what was lost, e' = 2 (x - C(x)): the feedback law is broken."""

    @override
    def note_sent(self, rows: Tensor, wire: Tensor, encoded: Encoded, scale: Tensor | None) -> None:
        super().note_sent(rows, wire, encoded, scale)
        self._next("residual", rows).mul_(2)


BROKEN: dict[str, type[Residual]] = {"doubled_residual": DoubledResidual}
"""Name -> what takes the place of `Residual`."""


@contextmanager
def broken(name: str | None) -> Iterator[None]:
    """Let memories that are made in here have the bug of that name; None: no bug.

    Replaces a class of the library for the whole process, and puts it back.

    Raises:
        ValueError: For unknown names.
    """
    check_broken(name)
    whole = error_feedback.Residual
    error_feedback.Residual = whole if name is None else BROKEN[name]  # type: ignore[misc]
    try:
        yield
    finally:
        error_feedback.Residual = whole  # type: ignore[misc]


def check_broken(name: str | None) -> None:
    """Raise ValueError for names that `broken` does not know."""
    if name is not None and name not in BROKEN:
        raise ValueError(f"Unknown broken={name!r}; valid names: {', '.join(BROKEN)}.")
