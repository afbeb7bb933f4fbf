"""Real gloo processes for tests: see `harness.run_ranks`."""
