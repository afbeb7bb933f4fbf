"""Runs, as ``dear-train``, one job from its config to its test."""
