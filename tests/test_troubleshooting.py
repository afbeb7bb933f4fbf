"""docs/troubleshooting.md quotes messages as they are in the code."""

from __future__ import annotations

import re
from pathlib import Path

from tests.apps.test_doctor import own_texts

PAGE = (Path(__file__).resolve().parents[1] / "docs/troubleshooting.md").read_text()


def messages() -> list[str]:
    """First cells of all tables but the last one, which is of what others say."""
    ours, _ = PAGE.split("\n## No message of ours\n")
    rows = re.findall(r"^\| (.*?) \| .* \| .* \|$", ours, re.MULTILINE)
    return [row for row in rows if row != "message"]


def test_messages_are_ours() -> None:
    texts = list(own_texts())
    assert len(messages()) >= 50
    for cell in messages():
        assert re.fullmatch(r"`[^`]+`", cell), cell
        pieces = [piece for piece in cell.strip("`").split("...") if piece.strip(" ,")]
        assert any(all(piece in text for piece in pieces) for text in texts), cell


def test_none_stands_twice() -> None:
    assert len(messages()) == len({*messages()})
