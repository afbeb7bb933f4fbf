"""`python -m lightning_dear.apps.bench`: the same as `dear-bench`."""

from lightning_dear.apps.bench.bench import main

main()
