"""Answers, in any training under DDP or `strategy="dear"`, what would make a step shorter."""

from lightning_dear.doctor.network_doctor import NetworkDoctor

__all__ = ["NetworkDoctor"]
