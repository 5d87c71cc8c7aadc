"""The compiled part: one C++ file, built on first use where there is a compiler, loaded by ctypes."""
