"""Modules that replace those of transformers and hold quantized weights."""
