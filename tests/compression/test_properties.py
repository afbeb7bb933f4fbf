"""Every compressor's formula, and what is true of all, for inputs of all kinds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compression.properties import PROPERTIES


@pytest.mark.parametrize("name", PROPERTIES)
@settings(max_examples=60)
@given(st.data())
def test_every_formula_is_true(name: str, data: st.DataObject) -> None:
    properties = PROPERTIES[name]
    compressor = data.draw(st.sampled_from(properties.instances))
    properties.check(compressor, data.draw(properties.inputs))
