"""All rows."""

from __future__ import annotations

from tests.lightning.matrix import (
    compiled,
    gradients,
    hooks,
    local_steps,
    loops,
    optimization,
    parameters,
    precision,
    weights,
)
from tests.lightning.matrix.different import DIFFERENT
from tests.lightning.matrix.refused import REFUSED_ROWS
from tests.lightning.matrix.rows import Feature, Refused
from tests.lightning.matrix.uncaught import UNCAUGHT

SECTIONS = (
    gradients,
    hooks,
    precision,
    optimization,
    parameters,
    weights,
    loops,
    compiled,
    local_steps,
)
FEATURES: dict[str, Feature] = {
    feature.name: feature for section in SECTIONS for feature in section.FEATURES
}
assert len(FEATURES) == sum(len(section.FEATURES) for section in SECTIONS), "a name twice"
REFUSED: dict[str, Refused] = {one.name: one for one in (*REFUSED_ROWS, *local_steps.REFUSED)}
assert len(REFUSED) == len(REFUSED_ROWS) + len(local_steps.REFUSED), "a name twice"

__all__ = ["FEATURES", "REFUSED", "UNCAUGHT", "DIFFERENT"]
