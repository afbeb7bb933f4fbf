"""docs/troubleshooting.md quotes messages as they are in the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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


def test_it_comes_first_in_the_sites_search() -> None:
    docs = Path(__file__).resolve().parents[1] / "docs"
    assert 'html_search_scorer = str(ROOT / "docs" / "search.js")' in (docs / "conf.py").read_text()
    first, second = re.findall(r'"(docs/\w+)": (\d+)', (docs / "search.js").read_text())
    assert first[0] == "docs/troubleshooting"
    assert int(first[1]) > int(second[1])


STOPPED_USERS = (
    "Unknown name",
    "unrecognized arguments",
    "Could not override",
    "connection closed by rank",
    "VOID",
    "No space left on device",
    "needs sklearn",
    "list index out of range",
    "Checkpoint file not found",
    "this machine refused",
    "records nothing",
)


@pytest.mark.parametrize("words", STOPPED_USERS)
def test_messages_that_stopped_users_are_found(words: str) -> None:
    assert words in PAGE
