"""Textbook methods as plain functions, which `hfq.quantize` does not use."""
