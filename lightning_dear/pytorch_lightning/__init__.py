"""Offers the strategy and the callbacks for `pytorch_lightning` instead of `lightning`.

    from lightning_dear.pytorch_lightning import DearStrategy
    from pytorch_lightning import Trainer

    Trainer(strategy=DearStrategy(bucket_cap_mb=50))

`strategy="dear"` needs only `import lightning_dear`. This folder has no files for its modules
(`strategy`, `callbacks`, ...). `lightning_dear/registration.py` makes these modules from the
originals at import.
"""

from typing import TYPE_CHECKING

from lightning_dear.versions import MIRROR_RANGES, warn_outside_tested_range

if TYPE_CHECKING:
    # For type checkers: classes with this package's interface, which are also of the types that
    # a Trainer of pytorch_lightning accepts.
    from pytorch_lightning import Callback
    from pytorch_lightning.strategies import DDPStrategy

    from lightning_dear import callbacks as _callbacks
    from lightning_dear.strategy import dear as _strategy

    class DearStrategy(_strategy.DearStrategy, DDPStrategy):  # type: ignore[misc]
        """Is `lightning_dear.DearStrategy` for `pytorch_lightning`."""

    class DearMonitor(_callbacks.DearMonitor, Callback):  # type: ignore[misc]
        """Is `lightning_dear.callbacks.DearMonitor` for `pytorch_lightning`."""

    class TimelineCallback(_callbacks.TimelineCallback, Callback):  # type: ignore[misc]
        """Is `lightning_dear.callbacks.TimelineCallback` for `pytorch_lightning`."""

else:
    from lightning_dear.pytorch_lightning.callbacks import DearMonitor, TimelineCallback
    from lightning_dear.pytorch_lightning.strategy import DearStrategy

warn_outside_tested_range(MIRROR_RANGES)

__all__ = ["DearMonitor", "DearStrategy", "TimelineCallback"]
