"""What `DearStrategy` does when a rank fails: say who failed first, save only what all can save.

Knows a strategy's methods but imports no Lightning.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from uuid import uuid4

from lightning_dear.strategy.failures.board import FailureBoard
from lightning_dear.strategy.failures.watch import FailureWatch

log = logging.getLogger(__name__)

_NO_TIMEOUT = timedelta(minutes=30)
"""torch's own, which `timeout=None` stands for."""


class FailureHandling:
    """Stands before `DDPStrategy` among the base classes of `DearStrategy`.

    Reports this rank's failure to the others, and saves nothing that would wait for them.
    `_on_failure` must be called before any other callback sees the exception: `CompletionGuard`,
    which stands first, does so.
    """

    _timeout: timedelta | None
    global_rank: Any
    world_size: Any
    lightning_module: Any
    broadcast: Any

    _failures = FailureWatch(FailureBoard(), _NO_TIMEOUT)
    """Of the present run; before the first one, of a run without other ranks."""

    def setup_environment(self) -> None:
        """As ever; then all ranks begin a new board. Collective, blocks."""
        super().setup_environment()  # type: ignore[misc]
        self._failures.close()
        attempt = self.broadcast(uuid4().hex)
        board = FailureBoard(attempt, self.global_rank, self.world_size)
        self._failures = FailureWatch(board, self._timeout or _NO_TIMEOUT)

    def barrier(self, name: str | None = None) -> None:
        """As ever; but after a failure it does not wait for ranks that never come."""
        board = self._failures.board
        if not board.has_failed:
            super().barrier(name)  # type: ignore[misc]
            return
        try:
            board.agree(f"meet at {name or 'a barrier'}")
        except RuntimeError as error:
            log.warning("Not all ranks are there after the failure. %s", error)

    def on_exception(self, exception: BaseException) -> None:
        """Reports the failure, if no callback has done so before."""
        self._on_failure(exception)

    def teardown(self) -> None:
        """As ever; the run is over for this rank."""
        self._failures.close()
        super().teardown()  # type: ignore[misc]

    def _on_failure(self, exception: BaseException) -> None:
        """Reports `exception` or says whose it was; acts once a run, blocks a few seconds."""
        self._failures.handle(exception)

    def _agree_after_failure(self, name: str) -> None:
        """Before a collective that may follow a failure: raises unless all ranks take part.

        Args:
            name: What the ranks want to do; stands in the error message after "Cannot".

        Raises:
            RuntimeError: Naming the ranks that came within `EXCEPTION_GRACE_S`.
        """
        board = self._failures.board
        if board.has_failed:
            step = 0 if self.lightning_module is None else self.lightning_module.global_step
            board.agree(name, f"step {step}")

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """After a failure, says of an error within that it keeps a checkpoint from being saved."""
        try:
            yield
        except RuntimeError as error:
            board = self._failures.board
            if not board.has_failed:
                raise
            raise RuntimeError(
                f"The parameters of the last step did not all arrive ({error}), so that they cannot"
                f" be saved. Resume from the last checkpoint. ({board.seen or 'See above.'})"
            ) from error
