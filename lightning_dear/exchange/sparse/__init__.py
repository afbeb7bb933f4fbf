"""Sums a few entries of each rank's gradients, in whatever places: Ok-Topk and its baselines."""
