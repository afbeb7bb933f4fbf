"""Measures links, codecs and steps, and hands them to the planners."""
