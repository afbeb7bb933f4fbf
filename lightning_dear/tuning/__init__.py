"""Measures links, codecs and steps in a running training, for the planners."""
