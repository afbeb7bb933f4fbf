"""What a Trainer drives: `DearStrategy`, what it refuses, its launchers and its checkpoints."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Imports `DearStrategy` when it is first asked for: Fabric needs other files of this room."""
    if name != "DearStrategy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_dear.strategy.dear import DearStrategy

    return DearStrategy
