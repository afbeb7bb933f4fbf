"""Removes each wait, flush and guard in turn, and sees that a test fails."""
