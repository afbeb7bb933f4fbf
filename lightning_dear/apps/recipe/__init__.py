"""Runs the papers' claims again; each module has one recipe's `make`."""
