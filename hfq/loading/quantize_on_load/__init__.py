"""Quantization of a float checkpoint while it is loaded."""
