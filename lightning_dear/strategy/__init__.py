"""Holds what a Trainer drives: `DearStrategy`, its refusals, launchers and checkpoints."""

from lightning_dear.strategy.dear import DearStrategy

__all__ = ["DearStrategy"]
