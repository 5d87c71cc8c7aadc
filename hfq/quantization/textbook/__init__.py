"""Textbook methods as plain functions: they write no checkpoint and `hfq.quantize` does not use them."""
