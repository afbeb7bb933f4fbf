"""Holds the command lines: thin Hydra entry points."""
