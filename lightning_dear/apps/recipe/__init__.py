"""The papers' claims, to run again; each module has one recipe's `make`."""
