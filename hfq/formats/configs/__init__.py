"""Parsers of `quantization_config`."""
