"""`python -m lightning_dear.apps.converge`: the same as `dear-converge`."""

from lightning_dear.apps.programs import converge

converge()
