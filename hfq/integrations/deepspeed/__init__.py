"""Quantized weights under DeepSpeed ZeRO-3."""
