"""Kernels of plain torch for CPUs."""
