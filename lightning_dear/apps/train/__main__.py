"""`python -m lightning_dear.apps.train`: the same as `dear-train`."""

from lightning_dear.apps.programs import train

train()
