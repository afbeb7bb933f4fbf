"""Tests of lightning_dear; the packages mirror the library's."""
