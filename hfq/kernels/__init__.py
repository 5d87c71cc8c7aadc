"""Kernels that multiply by quantized weights, and the registry that chooses one."""
