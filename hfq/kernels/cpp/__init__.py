"""The C++ kernels, built on first use if there is a compiler, and loaded by ctypes."""
