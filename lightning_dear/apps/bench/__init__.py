"""Compares, as ``dear-bench``, strategies side by side."""
