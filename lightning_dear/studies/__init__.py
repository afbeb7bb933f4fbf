"""Compares strategies side by side: competitors, measured steps, and bounds on a step's time.

`apps/bench/` is the command line; read `block.py` first, then `summary.py`.
"""
