"""Holds callbacks: `DearMonitor` and `TimelineCallback` for users, the others for the strategy."""

from lightning_dear.callbacks.compression_schedule import CompressionSchedule
from lightning_dear.callbacks.fusion_tuner import FusionTuner
from lightning_dear.callbacks.monitor import DearMonitor
from lightning_dear.callbacks.timeline import TimelineCallback

__all__ = ["CompressionSchedule", "DearMonitor", "FusionTuner", "TimelineCallback"]
