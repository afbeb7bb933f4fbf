"""Measures what a training step costs, and records what ran when."""
