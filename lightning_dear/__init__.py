"""Trains with DeAR under Lightning: `Trainer(strategy="dear")` after `import lightning_dear`.

For a Trainer of `lightning.pytorch` or of `pytorch_lightning`, imported before or after this
package, which by itself imports neither. `DearStrategy` is the class for `lightning.pytorch` (for
`pytorch_lightning`, where only that is installed); the one for `pytorch_lightning` is
`lightning_dear.pytorch_lightning.DearStrategy`.

The way in for readers is `engine/pipeline.py`.
"""

from typing import TYPE_CHECKING, Any

from lightning_dear.registration import register_now_or_later
from lightning_dear.versions import warn_outside_tested_range

__version__ = "0.1.0"
"""Of this package; the only place that says so, but for CITATION.cff."""

if TYPE_CHECKING:
    from lightning_dear.strategy.dear import DearStrategy

register_now_or_later()


def __getattr__(name: str) -> Any:
    """Imports `DearStrategy`, and with it Lightning and torch, when it is first asked for."""
    if name != "DearStrategy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_dear.strategy.dear import DearStrategy

    warn_outside_tested_range()
    globals()[name] = DearStrategy  # From now on found without this function.
    return DearStrategy


__all__ = ["DearStrategy", "__version__"]
