"""Descriptions of the layers of each format for the Triton kernels."""

from hfq.kernels.cuda.layers import block_layers, byte_layers, float_layers, word_layers  # noqa: F401  # each registers its own
from hfq.kernels.cuda.layers.descriptions import describe, reason_against
from hfq.kernels.cuda.layers.layout import Layer, Layout, fast

__all__ = ["Layer", "Layout", "describe", "fast", "reason_against"]
