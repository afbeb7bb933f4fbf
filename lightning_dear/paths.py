"""Where the files lie that are installed beside the code.

Imports neither torch nor Lightning, because the Hydra plugin runs this file on its own in every
Hydra application of an environment.
"""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def conf_dir() -> Path:
    """Return the folder of Hydra configs: inside an installed package, beside it in a checkout."""
    return _packaged("conf")


def recipes_dir() -> Path:
    """Return the folder of recipes: inside an installed package, beside it in a checkout."""
    return _packaged("recipes")


def _packaged(name: str) -> Path:
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name
