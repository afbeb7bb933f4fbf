"""DeAR for PyTorch Lightning: `Trainer(strategy="dear")` after `import lightning_dear`.

The way in for readers is `pipeline.py`.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_dear.strategy import DearStrategy
from lightning_dear.versions import warn_outside_tested_range

warn_outside_tested_range()
DearStrategy.register_strategies(StrategyRegistry)

__all__ = ["DearStrategy"]
