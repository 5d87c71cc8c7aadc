"""Kernels for CUDA devices."""
