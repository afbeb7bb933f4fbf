"""Callbacks for users: `CompressionSchedule`, `DearMonitor` and `TimelineCallback`."""

from lightning_dear.callbacks.compression_schedule import CompressionSchedule
from lightning_dear.callbacks.monitor import DearMonitor
from lightning_dear.callbacks.timeline import TimelineCallback

__all__ = ["CompressionSchedule", "DearMonitor", "TimelineCallback"]
