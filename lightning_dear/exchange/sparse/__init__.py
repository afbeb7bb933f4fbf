"""Sums a few values of each rank's gradients, each rank's in other places: Ok-Topk and others."""
