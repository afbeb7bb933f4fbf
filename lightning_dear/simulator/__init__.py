"""Predicts step times on networks that are not here, with the engine's own plans."""

from lightning_dear.simulator.network import Curve, Link, Network
from lightning_dear.simulator.simulate import SimulatedStep, simulate
from lightning_dear.simulator.workload import Workload

__all__ = ["Curve", "Link", "Network", "SimulatedStep", "Workload", "simulate"]
