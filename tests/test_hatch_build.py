"""What hatch_build.py says of a built package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
ADDRESS = "https://example.org/owner/name"
PAGE = "![a](b/c.png) [d](e.md#f) [g](https://h.org) [i](#j) [k](mailto:l@m) [`n`](o)"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The file as a module; hatchling is only where packages are built."""
    name = "hatchling.metadata.plugin.interface"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(MetadataHookInterface=object))
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def metadata_of(built: ModuleType, address: str, root: Path) -> dict[str, Any]:
    hook = built.CustomMetadataHook()
    hook.root, hook.config = str(root), {"address": address}
    metadata: dict[str, Any] = {}
    hook.update(metadata)
    return metadata


def test_relative_links_alone_get_the_address(built: ModuleType) -> None:
    files = f"{ADDRESS}/blob/HEAD"
    assert built.with_absolute_links(PAGE, ADDRESS) == (
        f"![a]({ADDRESS}/raw/HEAD/b/c.png) [d]({files}/e.md#f) [g](https://h.org) [i](#j)"
        f" [k](mailto:l@m) [`n`]({files}/o)"
    )


def test_no_address_no_urls_and_the_page_as_it_is(built: ModuleType) -> None:
    metadata = metadata_of(built, "", ROOT)
    assert metadata == {
        "readme": {"content-type": "text/markdown", "text": (ROOT / "README.md").read_text()}
    }


def test_an_address_is_named_in_all_places(built: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(PAGE)
    metadata = metadata_of(built, f"{ADDRESS}/", tmp_path)
    assert metadata["readme"]["text"] == built.with_absolute_links(PAGE, ADDRESS)
    assert all(one.startswith(ADDRESS) for one in metadata["urls"].values())


def test_readme_has_no_relative_link_left(built: ModuleType) -> None:
    text = built.with_absolute_links((ROOT / "README.md").read_text(), ADDRESS)
    targets = [part.partition(")")[0] for part in text.split("](")[1:]]
    assert targets
    assert [one for one in targets if not one.startswith(("https://", "#", "mailto:"))] == []
