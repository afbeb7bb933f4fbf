"""Trains with DeAR under Lightning: `Trainer(strategy="dear")` after `import lightning_dear`.

The Trainer may be that of `lightning.pytorch` or of `pytorch_lightning`, and may be imported before
or after this package, which does not import Lightning by itself. `DearStrategy` is the class for
`lightning.pytorch`. `lightning_dear.pytorch_lightning.DearStrategy` is the class for
`pytorch_lightning`. If only `pytorch_lightning` is installed, both names stand for the latter.

To read the code, begin with `engine/pipeline.py`.
"""

from typing import TYPE_CHECKING, Any

from lightning_dear.registration import register_now_or_later
from lightning_dear.versions import warn_outside_tested_range

__version__ = "0.1.0"
"""Version of this package. It is written here and in CITATION.cff, and nowhere else."""

if TYPE_CHECKING:
    from lightning_dear.strategy.dear import DearStrategy

register_now_or_later()


def __getattr__(name: str) -> Any:
    """Returns the class `DearStrategy`; raises an AttributeError for any other `name`.

    Python calls it if the module has no attribute `name`. The first access to `DearStrategy`
    imports it, and with it Lightning and torch, and warns if an untested version is installed.
    """
    if name != "DearStrategy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_dear.strategy.dear import DearStrategy

    warn_outside_tested_range()
    globals()[name] = DearStrategy  # Later accesses find it without calling this function.
    return DearStrategy


__all__ = ["DearStrategy", "__version__"]
