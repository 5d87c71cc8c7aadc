"""Textbook methods as plain functions. They write no checkpoints, and `hfq.quantize` does not use them."""
