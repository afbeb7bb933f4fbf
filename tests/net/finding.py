"""Modules of the package by what they are for, wherever a tree keeps them."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

PLACES: dict[str, tuple[str, ...]] = {
    "pipeline": ("engine.pipeline", "pipeline"),
    "options": (
        "exchange.options",
        "engine.exchange_options",
        "exchange.exchange_options",
        "exchange_options",
    ),
    "collectives": (
        "collectives.factory",
        "collectives.new",
        "collectives.making",
        "engine.collectives",
        "collectives",
    ),
    "compression": ("compression",),
    "planning": ("planning",),
    "registry": ("planning", "planning.registry"),
    "replay": ("workloads.replay", "workloads.replay.profile", "replay"),
    "planned": (
        "workloads.replay.profile",
        "workloads.replay.planned",
        "replay.planned",
        "simulator.planned",
    ),
    "digits": ("workloads.data", "workloads.digits", "workloads.vision.digits"),
    "classifier": ("workloads.task", "workloads.classifier", "workloads.vision.classifier"),
    "resnet": (
        "workloads.nets",
        "workloads.resnet",
        "workloads.models.resnet",
        "workloads.vision.resnet",
    ),
    "folder": ("checkpoint.folder", "checkpoint.folders", "lightning.checkpoint.folder"),
    "tuner": ("callbacks.fusion_tuner", "lightning.callbacks.fusion_tuner"),
}
"""What for -> names below `lightning_dear`, the new ones first. Add one when a file moves."""

HELPERS = ("", "_gradients", "gradients", "_mean", "mean", "_state", "state", "saved", "_plans")
"""Attributes of an object that may do what it once did itself."""


def find(what: str, name: str) -> Any:
    """Returns `name` of the module that is for `what`.

    A module that has no such name is passed over, as a room's `__init__` may be called as a file
    was before.

    Raises:
        ImportError: If no place has it; the message lists the places.
    """
    for place in PLACES[what]:
        module = _module(f"lightning_dear.{place}")
        if module is not None and hasattr(module, name):
            return getattr(module, name)
    raise ImportError(f"No {name} in any of: {', '.join(PLACES[what])}. Add a place to PLACES.")


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # What the module itself cannot import is an error.
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise


def of(owner: Any, name: str) -> Any:
    """Returns attribute `name` of `owner`, or of what it has handed that over to.

    Raises:
        AttributeError: If neither has it.
    """
    for helper in HELPERS:
        holder = getattr(owner, helper, None) if helper else owner
        if holder is not None and hasattr(holder, name):
            return getattr(holder, name)
    raise AttributeError(f"{type(owner).__name__} has no {name}; nor has any of {HELPERS}.")
