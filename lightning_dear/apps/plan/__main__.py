"""`python -m lightning_dear.apps.plan`: the same as `dear-plan`."""

from lightning_dear.apps.plan.plan import main

main()
