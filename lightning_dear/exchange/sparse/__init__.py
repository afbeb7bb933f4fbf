"""Sums a few of each rank's numbers, wherever they stand: Ok-Topk, and its baselines."""
