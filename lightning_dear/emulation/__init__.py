"""Emulates a cluster on one Linux machine: a network namespace for each host, and shaped links.

Needs iproute2 and root, either real root or root of the user's own namespaces. Imports neither
torch nor Lightning.
"""

from lightning_dear.emulation.cluster import EmulatedCluster, EmulatedHost, remove_stale_namespaces
from lightning_dear.emulation.launch import emulated_rig, run_on_cluster
from lightning_dear.emulation.shell import AS_OWN_ROOT, EmulationUnavailable, why_unavailable

__all__ = [
    "AS_OWN_ROOT",
    "EmulatedCluster",
    "EmulatedHost",
    "EmulationUnavailable",
    "emulated_rig",
    "remove_stale_namespaces",
    "run_on_cluster",
    "why_unavailable",
]
