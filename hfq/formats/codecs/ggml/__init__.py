"""Decoders of ggml's blocks, bit-identical to ggml's own."""
