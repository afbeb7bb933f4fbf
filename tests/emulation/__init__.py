"""Tests of lightning_dear.emulation."""
