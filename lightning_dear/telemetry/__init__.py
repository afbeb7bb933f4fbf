"""Measures waits, sent bytes and device work of training steps, and records timelines of them."""
