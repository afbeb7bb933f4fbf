"""`python -m lightning_dear.apps.train`: the same as `dear-train`."""

from lightning_dear.apps.train.train import main

main()
