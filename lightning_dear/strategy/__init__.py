"""Holds the Trainer's `DearStrategy`, with its checks, launchers and checkpoint files."""

from lightning_dear.strategy.dear import DearStrategy

__all__ = ["DearStrategy"]
