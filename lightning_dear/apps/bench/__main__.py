"""`python -m lightning_dear.apps.bench`: the same as `dear-bench`."""

from lightning_dear.apps.programs import bench

bench()
