"""Every checkpoint carries a format number; an unknown one is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_dear.checkpoint.files import CHECKPOINT_KEY, FORMAT, check_format, stamp


def test_a_stamped_checkpoint_is_read() -> None:
    checkpoint: dict[str, Any] = {"state_dict": {}}
    stamp(checkpoint)
    assert checkpoint == {"state_dict": {}, CHECKPOINT_KEY: {"format": FORMAT}}
    check_format(checkpoint)


def test_stamping_keeps_what_stands_beside_the_number() -> None:
    checkpoint: dict[str, Any] = {CHECKPOINT_KEY: {"format": 0, "residuals": [1]}}
    stamp(checkpoint)
    assert checkpoint[CHECKPOINT_KEY] == {"format": FORMAT, "residuals": [1]}


def test_a_checkpoint_of_ddp_is_fine() -> None:
    check_format({"state_dict": {}})


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"format": FORMAT + 1}, rf"format {FORMAT + 1}, .*pip install -U lightning-dear"),
        ({"format": 0}, "format 0, .*the version of lightning-dear that wrote it"),
        ({"format": "1"}, "format '1'"),
        ({"format": True}, "format True"),
        ({}, "format None"),
        ("1", "format None"),
    ],
)
def test_an_unknown_number_is_refused_by_name(own: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_format({CHECKPOINT_KEY: own})
