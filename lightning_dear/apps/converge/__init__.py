"""Compares, as ``dear-converge``, how training ends under each compressor."""
