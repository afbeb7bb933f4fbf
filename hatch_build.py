"""What a built package says of itself: README with links that lead somewhere, and addresses.

Both follow from one setting, `address` in pyproject.toml. While that is empty there are no
addresses, and README is taken as it is.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


def with_absolute_links(text: str, address: str) -> str:
    """Return a page of Markdown whose relative links and pictures lead to files at an address."""
    relative = r"(?!\w+:|#)"
    text = re.sub(rf"(!\[[^\]]*\]\(){relative}", rf"\g<1>{address}/raw/HEAD/", text)
    return re.sub(rf"(\]\(){relative}", rf"\g<1>{address}/blob/HEAD/", text)


class CustomMetadataHook(MetadataHookInterface):
    """Called by hatchling."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the project's `readme` and, with an address, its `urls`."""
        address = self.config["address"].rstrip("/")
        text = Path(self.root, "README.md").read_text()
        if address:
            text = with_absolute_links(text, address)
            metadata["urls"] = {
                "Source": address,
                "Issues": f"{address}/issues",
                "Changelog": f"{address}/blob/HEAD/CHANGELOG.md",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
