"""What a Trainer drives: `DearStrategy`, what it refuses, its launchers and its checkpoints."""

from lightning_dear.strategy.dear import DearStrategy

__all__ = ["DearStrategy"]
