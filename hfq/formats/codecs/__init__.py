"""Codes and scales as bits: no format, no config."""
