"""Holds the strategy that `Fabric(strategy="dear")` uses."""

from lightning_dear.fabric.strategy import DearFabricStrategy

__all__ = ["DearFabricStrategy"]
