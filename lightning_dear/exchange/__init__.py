"""Exchanges move buckets: they own communication and, with compressors, residuals."""

from lightning_dear.exchange.dense import DenseExchange

__all__ = ["DenseExchange"]
