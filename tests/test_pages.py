"""Pages are short, in short sentences, and their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import mean

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
RECIPES = sorted((ROOT / "recipes").rglob("README.md"))
OTHERS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES = [*OTHERS, *DOCS, *RECIPES]

MOST_IN_A_SENTENCE, MEAN_IN_A_SENTENCE = 35, 16
IN_DOCS, IN_README, IN_README_WITH_ALL, IN_A_RECIPE = 11_000, 520, 1_000, 600
ROWS_IN_A_RECIPES_TABLE, TABLES_IN_A_RECIPE = 15, 2


def prose(text: str) -> str:
    """Without tables and code, as the words of pages are counted."""
    lines = re.sub(r"```.*?```", "", text, flags=re.DOTALL).splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith("|"))


def sentences(text: str) -> list[str]:
    """Of paragraphs, items of lists and headings, which are no part of what follows them."""
    # What a link, a picture or a comment leads to is not read.
    text = re.sub(r"<!--.*?-->", "", prose(text), flags=re.DOTALL)
    text = re.sub(r"!\[([^\]]*)\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    # Code within a line is one word.
    text = re.sub(r"`[^`]+`", "code", text)
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*+] |\d+\. |#+ ))|(?<=\n)(?=#)", text)
    parts = [part for block in blocks for part in re.split(r"(?<=[.?!])[\s)*_]+", block)]
    return [one for part in parts if (one := " ".join(re.findall(r"[^\s#>*|-]\S*", part)))]


def lengths(text: str) -> list[int]:
    return [len(one.split()) for one in sentences(text)]


def tables(text: str) -> list[int]:
    """Rows of each, without titles."""
    found = re.findall(r"(?:^\|.*\n?)+", text, flags=re.MULTILINE)
    return [len(table.strip().splitlines()) - 2 for table in found]


def anchors(text: str) -> set[str]:
    """Of headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", one).lower() for one in titles]
    return {re.sub(r"[^\w\- ]", "", one).strip().replace(" ", "-") for one in plain}


def num_words(page: Path) -> int:
    return len(prose(page.read_text()).split())


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_sentence_is_long(page: Path) -> None:
    found = sentences(page.read_text())
    assert [one for one in found if len(one.split()) > MOST_IN_A_SENTENCE] == []


def test_sentences_are_short_on_the_average() -> None:
    # Headings and names in lists would flatter it.
    all_lengths = [one for page in PAGES for one in lengths(page.read_text()) if one > 3]
    assert mean(all_lengths) <= MEAN_IN_A_SENTENCE


def test_few_words_say_it() -> None:
    readme = ROOT / "README.md"
    assert sum(map(num_words, DOCS)) <= IN_DOCS
    assert num_words(readme) <= IN_README
    assert len(readme.read_text().split()) <= IN_README_WITH_ALL


@pytest.mark.parametrize("page", RECIPES, ids=name)
def test_a_recipe_is_read_in_two_minutes(page: Path) -> None:
    rows = tables(page.read_text())
    assert num_words(page) <= IN_A_RECIPE
    assert len(rows) <= TABLES_IN_A_RECIPE
    assert not rows or max(rows) <= ROWS_IN_A_RECIPES_TABLE


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link
