"""``dear-bench``: strategies side by side."""
