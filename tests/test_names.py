"""What a misspelt name is taken for."""

from __future__ import annotations

import pytest

from lightning_dear import DearStrategy
from lightning_dear.names import is_meant

NAMES = ("auto", "int8", "dear_64gpu")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("aut", "auto"), ("int88", "int8"), ("Int-8", "int8"), ("dear_64gp", "dear_64gpu")],
)
def test_the_nearest_name_is_asked_for(name: str, meant: str) -> None:
    assert is_meant(name, NAMES) == f" Is {meant!r} meant?"


def test_a_name_like_no_other_is_not_guessed_at() -> None:
    assert is_meant("xyz", NAMES) == is_meant("", NAMES) == is_meant("auto", ()) == ""


def test_users_are_asked() -> None:
    for options, meant in (({"fusion": "aut"}, "auto"), ({"compressor": "int88"}, "int8")):
        with pytest.raises(ValueError, match=f"Is '{meant}' meant"):
            DearStrategy(**options)
