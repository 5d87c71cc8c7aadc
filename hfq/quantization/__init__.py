"""Quantization of float checkpoints: GPTQ and AWQ, and the driver that runs them layer by layer."""
