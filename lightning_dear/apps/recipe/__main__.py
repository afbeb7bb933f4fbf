"""`python -m lightning_dear.apps.recipe`: the same as `dear-recipe`."""

from lightning_dear.apps.programs import recipe

recipe()
