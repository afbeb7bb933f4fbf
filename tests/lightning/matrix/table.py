"""All rows."""

from __future__ import annotations

from tests.lightning.matrix import (
    compiled,
    gradients,
    loops,
    optimization,
    parameters,
    precision,
    weights,
)
from tests.lightning.matrix.rows import Feature

SECTIONS = (gradients, precision, optimization, parameters, weights, loops, compiled)
FEATURES: dict[str, Feature] = {
    feature.name: feature for section in SECTIONS for feature in section.FEATURES
}
assert len(FEATURES) == sum(len(section.FEATURES) for section in SECTIONS), "a name twice"
