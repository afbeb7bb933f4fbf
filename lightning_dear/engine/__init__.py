"""Runs one training step, from gradients to parameters. Read `pipeline.py` first."""
