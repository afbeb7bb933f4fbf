"""Adds `NetworkDoctor` to each Trainer of a script, if LIGHTNING_DEAR_DOCTOR is set.

Lightning calls these functions in every Trainer of the environment, also in scripts that do not use
this package. So nothing is imported while the variable is not set, and a failure only warns.
"""

import os
from typing import Any


def callbacks() -> list[Any]:
    """Returns callbacks for a Trainer of `lightning`."""
    return _made("lightning_dear.doctor")


def mirrored_callbacks() -> list[Any]:
    """Returns callbacks for a Trainer of `pytorch_lightning`."""
    return _made("lightning_dear.pytorch_lightning.doctor")


def _made(module: str) -> list[Any]:
    if os.environ.get("LIGHTNING_DEAR_DOCTOR", "0") in ("", "0"):
        return []
    try:
        from importlib import import_module

        return [import_module(module).NetworkDoctor()]
    except Exception as error:
        import warnings
        from contextlib import suppress

        with suppress(Exception):
            warnings.warn(f"LIGHTNING_DEAR_DOCTOR has no effect: {error!r}.", stacklevel=1)
        return []
