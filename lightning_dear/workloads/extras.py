"""Packages that only some workloads need."""

from importlib import import_module
from typing import Any


def require(module: str, extra: str) -> Any:
    """Import and return ``module``.

    Args:
        module: Dotted name.
        extra: Our extra that installs it.

    Raises:
        ModuleNotFoundError: If it is not installed; the message names the extra.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        raise ModuleNotFoundError(
            f'This job needs {package}: pip install "lightning-dear[{extra}]"', name=error.name
        ) from error
