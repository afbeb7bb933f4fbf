"""Writes and reads checkpoints: whole in a file, or in pieces in a folder."""
