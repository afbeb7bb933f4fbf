"""Holds models and data for the command line: small ones, and images behind an extra."""
