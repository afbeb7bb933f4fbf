"""Predicts step times on networks that are not here, with the engine's own plans."""

from lightning_dear.planning.step import Program
from lightning_dear.simulator.network import ALGORITHMS, Algorithm, Curve, Link, Network
from lightning_dear.simulator.schedule import Schedule
from lightning_dear.simulator.simulate import SimulatedStep, simulate
from lightning_dear.simulator.workload import Workload

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Curve",
    "Link",
    "Network",
    "Program",
    "Schedule",
    "SimulatedStep",
    "Workload",
    "simulate",
]
