"""`python -m lightning_dear.apps.calibrate`: the same as `dear-plan calibrate`."""

from lightning_dear.apps.programs import calibrate

calibrate()
