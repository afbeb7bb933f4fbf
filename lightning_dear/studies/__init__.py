"""Compares strategies side by side: competitors, what a step takes, and what it could.

`apps/bench/` is the command line; read `block.py` first, then `summary.py`.
"""
