"""Strategies side by side: the competitors, what is measured of a step, and what could be.

`apps/bench/` is the command line; read `block.py` first, then `summary.py`.
"""
