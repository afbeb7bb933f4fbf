"""What marks a checkpoint as ours: its format number, so that a later one can be refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_dear.optimizers.masters import MASTER_KEY

KEY = "lightning_dear"
"""Under which a checkpoint holds what only this package reads."""

FORMAT = 1
"""Of what is written now. Grows when what older versions would read wrongly is written."""

METADATA_FILE = ".metadata"
"""torch.distributed.checkpoint's own; a folder without it is not a complete checkpoint."""


def forget_masters(checkpoint: Mapping[str, Any]) -> None:
    """Drops masters from the optimizers' states in `checkpoint`, which another strategy wrote.

    It has stepped the weights, and kept the masters as it keeps all state that it does not know.
    """
    for value in checkpoint.values():
        for state in value if isinstance(value, list) else [value]:
            if isinstance(state, Mapping) and {"state", "param_groups"} <= state.keys():
                for own in state["state"].values():
                    if isinstance(own, dict):
                        own.pop(MASTER_KEY, None)


def stamp(checkpoint: dict[str, Any]) -> None:
    """Writes the format number into `checkpoint`, beside what else stands under `KEY`."""
    checkpoint[KEY] = {**checkpoint.get(KEY, {}), "format": FORMAT}


def check(checkpoint: Mapping[str, Any]) -> None:
    """Refuses a checkpoint that this version cannot read; one without `KEY` is DDP's, and fine.

    Raises:
        ValueError: Naming the format number and what to do.
    """
    if KEY not in checkpoint:
        return
    own = checkpoint[KEY]
    number = own.get("format") if isinstance(own, Mapping) else None
    if number == FORMAT and not isinstance(number, bool):
        return
    if isinstance(number, int) and number > FORMAT:
        advice = "A newer lightning-dear wrote it: upgrade this one (pip install -U lightning-dear)"
    else:
        advice = "Load it with the version of lightning-dear that wrote it"
    raise ValueError(
        f"The checkpoint has lightning_dear format {number!r}; this version reads {FORMAT}."
        f" {advice}, or drop checkpoint['{KEY}'] to load it as DDP's own."
    )
