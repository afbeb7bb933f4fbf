"""Lets `Fabric(strategy="dear")` work after `import lightning_dear`; see `strategy.py`."""

from lightning_dear.fabric.strategy import DearFabricStrategy

__all__ = ["DearFabricStrategy"]
