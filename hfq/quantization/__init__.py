"""Quantization of float checkpoints: GPTQ, AWQ, and the driver of the layers."""
