"""Models that wait instead of computing, so that many ranks on few cores send real messages."""

from lightning_dear.workloads.replay.model import ReplayData, ReplayModel
from lightning_dear.workloads.replay.profile import LayerProfile, ModelProfile, load_profile

__all__ = ["LayerProfile", "ModelProfile", "ReplayData", "ReplayModel", "load_profile"]
