"""`python -m lightning_dear.apps.plan`: the same as `dear-plan`."""

from lightning_dear.apps.programs import plan

plan()
