"""Of each rank's numbers a few are summed, wherever they stand: Ok-Topk, and its baselines."""
