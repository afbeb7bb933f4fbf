"""Finds the folders of configs and recipes, which are installed together with the code.

This file imports neither torch nor Lightning, because the Hydra plugin runs it by itself in every
Hydra application of the environment.
"""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def conf_dir() -> Path:
    """Returns the folder of Hydra configs: in an installed package, or beside it in a checkout."""
    return _packaged("conf")


def recipes_dir() -> Path:
    """Returns the folder of recipes: in an installed package, or beside it in a checkout."""
    return _packaged("recipes")


def _packaged(name: str) -> Path:
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name
