"""Finds the folders of configs and recipes, which are installed together with the code.

This file imports neither torch nor Lightning, because the Hydra plugin of this package runs it,
without importing the package, in every Hydra application of the Python environment.
"""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def conf_dir() -> Path:
    """Returns the folder of Hydra configs: `conf` in the package if installed, else beside it.

    (Beside the package in a checkout of the repository.)
    """
    return _packaged("conf")


def recipes_dir() -> Path:
    """Returns the folder of recipes: `recipes` in the package if installed, else beside it.

    (Beside the package in a checkout of the repository.)
    """
    return _packaged("recipes")


def _packaged(name: str) -> Path:
    """Returns the folder `name` of this package, or if there is none, of the folder around it."""
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name
