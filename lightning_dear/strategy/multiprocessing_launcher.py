"""Starting ranks with spawn or fork: what they fail of reaches the process that started them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from typing_extensions import override

from lightning_dear.strategy.failures.board import REPORT_WAIT_S, is_consequence
from lightning_dear.strategy.failures.handling import FailureHandling


class ReportingLauncher(_MultiProcessingLauncher):
    """Lightning's launcher, whose ranks say who failed first.

    Lightning hands an exception to callbacks and strategy in the process that started the ranks,
    where nothing is known of it but the traceback of the rank that ended first.
    """

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls `function` on all ranks; returns rank 0's result. Blocks until all have ended."""
        strategy = self._strategy
        assert isinstance(strategy, FailureHandling)
        return super().launch(partial(_reporting, strategy, function), *args, **kwargs)


def _reporting(
    strategy: FailureHandling, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    try:
        return function(*args, **kwargs)
    except BaseException as exception:
        strategy._on_failure(exception)
        if is_consequence(exception):
            # torch shows the user the error of the rank that ends first, and ends the others.
            time.sleep(REPORT_WAIT_S)
        raise
