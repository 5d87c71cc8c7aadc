"""Quantizes a float checkpoint while it is loaded."""
