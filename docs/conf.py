"""Makes the site of this project: `make docs`, or `sphinx-build -c docs -W . docs/_build/html`.

The source is the whole repository, so that the pages' links lead to the same files on the site as
where the repository is read. Pages are Markdown; `api.md` is filled from docstrings.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lightning_dear import __version__  # noqa: E402

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
_ADDRESS = _TOOLS["hatch"]["metadata"]["hooks"]["custom"]["address"]

project = "lightning-dear"
author = "The lightning-dear authors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = [
    "*.md",
    "docs/*.md",
    "tests/README.md",
    "recipes/README.md",
    "recipes/*/README.md",
    "recipes/local_steps/clock/README.md",
    "recipes/local_steps/speed/README.md",
]
exclude_patterns = [".*", "lightning_dear", "conf", "examples", "outputs", "multirun"]
exclude_patterns += [
    "build",
    "dist",
    "logs",
    "lightning_logs",
    "checkpoints",
    "data",
    "docs/_build",
]

# As GitHub makes them, for links to headings.
myst_heading_anchors = 3

# Docstrings are Google's kind, with names in single backticks.
default_role = "code"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_default_options = {"members": True, "show-inheritance": True}

html_theme = "furo"
html_title = f"{project} {version}"
html_theme_options = {"source_repository": _ADDRESS, "source_branch": "main"} if _ADDRESS else {}
# Troubleshooting comes first for words of messages.
html_search_scorer = str(ROOT / "docs" / "search.js")
html_show_sourcelink = html_copy_source = False
# Its index.html leads from the top of the site to docs/index.html.
html_extra_path = ["_root"]


def without_substitutions(*arguments: Any) -> None:
    """Let the bars of a docstring's formulas, such as |x|, be bars."""
    lines: list[str] = arguments[-1]
    # Not those within backticks.
    parts = [re.split(r"(`[^`]*`)", line) for line in lines]
    for words in parts:
        words[::2] = [text.replace("|", r"\|") for text in words[::2]]
    lines[:] = map("".join, parts)


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", without_substitutions)
