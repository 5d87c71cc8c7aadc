"""CPU kernels in plain torch."""
