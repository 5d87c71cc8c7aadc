"""Quantization of float checkpoints: GPTQ, AWQ, and the driver that runs them layer by layer."""
