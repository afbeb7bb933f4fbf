"""Command lines: thin Hydra entry points."""
